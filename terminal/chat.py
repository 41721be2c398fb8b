"""The loop: a line is read, carried out or asked, and the answer is shown while it comes."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing

from terminal.client import ChatFailed, Client
from terminal.commands import BadCommand, Session, carry_out, help_text
from terminal.conversation import Answer, Conversation
from terminal.screen import Screen, harmless

_PROMPT = "> "


class Chat:
    """One conversation in one terminal."""

    def __init__(self, client: Client, conversation: Conversation, screen: Screen) -> None:
        self._client = client
        self._conversation = conversation
        self._screen = screen
        self._session = Session(conversation, client.models)
        self._interactive = sys.stdin.isatty()
        self.failed = False  # whether the last answer could not be had

    def run(self) -> None:
        """Talk until /quit or the end of the input."""
        while True:
            try:
                line = self._read(_PROMPT)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._screen.note("\n/quit or Ctrl-D leaves")
                continue
            if line in ("/quit", "/exit"):
                return
            if line:
                self._do(line)

    def _do(self, line: str) -> None:
        try:
            if line == "/help":
                self._screen.note(help_text())
            elif line == "/retry":
                if not self._conversation.take_back_answer():
                    raise BadCommand("there is nothing to retry yet")
                self._answer()
            elif line.startswith("/"):
                self._screen.note(carry_out(self._session, line))
            else:
                self._conversation.ask(line)
                self._answer()
        except (BadCommand, ChatFailed) as error:
            self._screen.trouble(str(error))

    def _read(self, prompt: str) -> str:
        """One message: lines that end in a backslash go on."""
        lines: list[str] = []
        while True:
            line = input(prompt if self._interactive else "")
            if not line.endswith("\\"):
                return "\n".join([*lines, line]).strip()
            lines.append(line[:-1])

    def _answer(self) -> None:
        while calls := self._one_answer().calls:
            for call in calls:
                self._conversation.result(call, self._result_of(call))

    def _result_of(self, call: dict[str, dict[str, str]]) -> str:
        """What a person says that the tool answered."""
        name = harmless(call["function"]["name"])
        try:
            return self._read(f"what {name} answers> ")
        except (EOFError, KeyboardInterrupt):
            raise BadCommand(f"the call of {name} was not answered") from None

    def _one_answer(self) -> Answer:
        """Stream one answer. Ctrl-C keeps what has come so far."""
        answer = Answer()
        stopped = False
        self.failed = True
        started = time.monotonic()
        try:
            with closing(self._client.chat(self._conversation.request())) as pieces:
                for piece in pieces:
                    self._show(answer, piece.reasoning, piece.content)
                    answer.add(piece)
            self.failed = False
        except KeyboardInterrupt:
            stopped, self.failed = True, False
        finally:
            if stopped or self.failed:
                answer.calls.clear()  # they may be cut in the middle
            if not answer.empty:
                self._screen.end()
            self._conversation.take(answer)
        for call in answer.calls:
            called = call["function"]
            self._screen.note(f"calls {called['name']}({_on_one_line(called['arguments'])})")
        if self._screen.interactive or stopped or answer.finish_reason == "length":
            self._screen.note(_facts(answer, stopped, time.monotonic() - started))
        return answer

    def _show(self, answer: Answer, reasoning: str, content: str) -> None:
        if reasoning:
            self._screen.thought(reasoning)
        if content:
            # What stands before the first word would only be an empty line.
            self._screen.answer(content if answer.content else content.lstrip("\n"))


def _on_one_line(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except ValueError:
        return arguments


def _facts(answer: Answer, stopped: bool, seconds: float) -> str:
    notes = ["stopped"] if stopped else []
    if answer.finish_reason == "length":
        notes.append("cut at the token limit")
    if answer.tokens:
        notes.append(f"{answer.tokens} tokens in {seconds:.1f} s")
    return f"[{', '.join(notes) or f'{seconds:.1f} s'}]"
