"""Runs a conversation in the terminal with a model of a gateway."""

from __future__ import annotations

import sys
from typing import Any

import click

from cli.client import Client, Refused

HELP = """\
/clear  begin a new conversation
/bye    end (also Ctrl-D); Ctrl-C stops an answer
A line that ends with a backslash continues in the next line."""


class Conversation:
    """A conversation: the messages so far, and the fields that every request has."""

    def __init__(self, client: Client, model: str, system: str = "", **options: Any) -> None:
        self._client = client
        self._body = {"model": model, "stream": True, **options}
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = []

    def ask(self, prompt: str) -> None:
        """Send a message, and print the answer as it arrives. Raises Refused, KeyboardInterrupt.

        If the user interrupts the answer, its first part stays in the conversation.
        """
        sent = {"role": "user", "content": prompt}
        body = self._body | {"messages": [*self._system, *self._messages, sent]}
        parts: list[str] = []
        thinking = False
        try:
            for event in self._client.streamed("/v1/chat/completions", body):
                for choice in event.get("choices", ()):
                    delta = choice["delta"]
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
