"""Runs a conversation in the terminal with a model of a gateway."""

from __future__ import annotations

import select
import sys
from collections.abc import Sequence
from typing import Any

import click

from cli.client import Client, Refused

HELP = """\
/clear  begin a new conversation
/bye    end (also Ctrl-D); Ctrl-C stops an answer
A line that ends with a backslash continues in the next line."""
_PIPE_SECONDS = 1.0  # that a pipe may stay silent beside a prompt


def question(words: Sequence[str]) -> str | None:
    """Return the message to answer: what is piped in, and the words of the command line.

    None stands for a conversation in the terminal. Raises UsageError for an empty message.
    """
    piped = ""
    if sys.stdin and not sys.stdin.isatty():
        # A program may leave an open pipe that nobody writes to; without words there is no choice.
        if not words or select.select([sys.stdin], [], [], _PIPE_SECONDS)[0]:
            piped = sys.stdin.buffer.read().decode(errors="replace").rstrip("\r\n")
        else:
            click.echo("Nothing is piped in: the answer is to PROMPT alone.", err=True)
    elif not words and sys.stdin:
        return None
    text = "\n\n".join(part for part in (piped, " ".join(words)) if part.strip())
    if not text:
        raise click.UsageError("the message is empty: give PROMPT, or pipe a text in")
    return text


class Conversation:
    """A conversation: the messages so far, and the fields that every request has."""

    def __init__(self, client: Client, model: str, system: str = "", **options: Any) -> None:
        self._client = client
        self._body = {"model": model, "stream": True, **options}
        self._system = [{"role": "system", "content": _valid(system)}] if system else []
        self._messages: list[dict[str, Any]] = []

    def ask(self, prompt: str) -> None:
        """Send a message, and print the answer as it arrives. Raises Refused, KeyboardInterrupt.

        If the user interrupts the answer, its first part stays in the conversation.
        """
        sent = {"role": "user", "content": _valid(prompt)}
        body = self._body | {"messages": [*self._system, *self._messages, sent]}
        parts: list[str] = []
        begun = thinking = False
        try:
            for event in self._client.streamed("/v1/chat/completions", body):
                for choice in event.get("choices", ()):
                    delta = choice["delta"]
                    begun = True
                    if thought := delta.get("reasoning_content"):
                        thinking = True
                        click.secho(thought, dim=True, nl=False, err=not sys.stdout.isatty())
                    if text := delta.get("content"):
                        if thinking:
                            click.echo(err=not sys.stdout.isatty())
                        thinking = False
                        parts.append(text)
                        click.echo(text, nl=False)
        finally:
            if begun:
                click.echo()
            if parts:
                self._messages += [sent, {"role": "assistant", "content": "".join(parts)}]

    def talk(self) -> None:
        """Read messages from the terminal until the user ends the conversation."""
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives `input` a history and editing keys
        click.echo("Type a message, or /? for help.", err=True)
        while (line := _message()) is not None:
            if line in ("/bye", "/exit", "/quit"):
                return
            if line == "/clear":
                self._messages.clear()
            elif line in ("/?", "/help"):
                click.echo(HELP, err=True)
            elif line.startswith("/") and " " not in line:
                click.echo(f"{line} is not a command: see /?", err=True)
            elif line:
                try:
                    self.ask(line)
                except Refused as refusal:
                    refusal.show()
                except KeyboardInterrupt:
                    click.echo("[stopped]", err=True)


def _message() -> str | None:
    """Return the user's next message; None at the end of the input."""
    lines = []
    prompt = ">>> "
    while True:
        try:
            line = input(prompt)
        except EOFError:
            click.echo(err=True)
            return None
        except KeyboardInterrupt:
            click.echo("\nUse /bye or Ctrl-D to end.", err=True)
            return ""
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines).strip()
        prompt = "... "


def _valid(text: str) -> str:
    """Return the text with U+FFFD for bytes that are not UTF-8: Python reads surrogates there."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
