"""What is written where: answers to stdout, all else to stderr where nobody looks at a terminal.

A model's text is shown, never obeyed: control characters that could move the cursor, rename the
window or fake a prompt are taken out of it.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

_DIM = "\x1b[2m"
_BAD = "\x1b[31m"
_PLAIN = "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """The text without control characters and marks that turn the direction of writing."""
    return _CONTROL.sub("", text)


class Screen:
    """A terminal, or a pipe that only wants the answers."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self.interactive = self._out.isatty()
        self._thinking = False

    def answer(self, text: str) -> None:
        """A piece of the answer."""
        self._end_thought()
        self._write(self._out, harmless(text))

    def thought(self, text: str) -> None:
        """A piece of the reasoning, dimmed; beside the answer where that goes into a pipe."""
        target = self._out if self.interactive else self._err
        if not self._thinking:
            self._thinking = True
            self._write(target, _DIM if target.isatty() else "")
        self._write(target, harmless(text))

    def end(self) -> None:
        """The answer is complete, or as complete as it gets."""
        self._end_thought()
        self._write(self._out, "\n")

    def note(self, text: str) -> None:
        """A line about the conversation, not of it."""
        self._line(text, _DIM)

    def trouble(self, text: str) -> None:
        """A line about what went wrong."""
        self._line(text, _BAD)

    def _line(self, text: str, style: str) -> None:
        shown = harmless(text)
        self._write(self._err, f"{style}{shown}{_PLAIN}\n" if self._err.isatty() else f"{shown}\n")

    def _end_thought(self) -> None:
        if self._thinking:
            self._thinking = False
            target = self._out if self.interactive else self._err
            self._write(target, f"{_PLAIN}\n\n" if target.isatty() else "\n")

    @staticmethod
    def _write(target: TextIO, text: str) -> None:
        if text:
            target.write(text)
            target.flush()
