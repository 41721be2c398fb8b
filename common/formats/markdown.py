"""Whether the current position in a text is inside a code block or inline code.

Markers that a model quotes are text. Fences follow CommonMark (up to three spaces, three or more
backticks or tildes, closed by at least as many). Inline code ends at the latest with its line, so
that one stray backtick cannot hide everything after it.
"""

from __future__ import annotations

import re

_RUN = re.compile(r"`+|~+|\n|[^`~\n]+")


class Markdown:
    """Follows a text piece by piece; it may be split anywhere."""

    def __init__(self) -> None:
        self._fence = ""
        self._inline = 0
        self._run = ""
        self._line_is_blank = True
        self._indent = 0
        self._closing = False
        self._opening_line = False

    def feed(self, text: str) -> None:
        for match in _RUN.finditer(text):
            self._read(match.group())

    @property
    def fenced(self) -> bool:
        """Whether the position is inside a code block."""
        if self._fence:
            return not (self._closing or self._run_closes())
        return self._starts_line() and len(self._run) >= 3

    @property
    def fence(self) -> str:
        """The fence that opened the code block."""
        return self._fence or self._run

    @property
    def quoted(self) -> bool:
        """Whether the position is inside a code block or inline code."""
        if self._fence or self.fenced:
            return self.fenced
        if self._run.startswith("`"):
            return self._inline != len(self._run)
        return bool(self._inline)

    @property
    def line_start(self) -> bool:
        """Whether only blanks come before this position on its line."""
        return self._line_is_blank and not self._run

    def _read(self, run: str) -> None:
        if run[0] in "`~":
            if self._run and self._run[0] != run[0]:
                self._end_run()
            self._run += run
            return
        self._end_run()
        if run == "\n":
            if self._closing:
                self._fence = ""
            self._line_is_blank, self._indent, self._inline = True, 0, 0
            self._closing = self._opening_line = False
            return
        blank = not run.strip()
        self._indent += len(run) if blank else 0
        self._line_is_blank = self._line_is_blank and blank
        self._closing = self._closing and blank

    def _starts_line(self) -> bool:
        return self._line_is_blank and self._indent <= 3

    def _run_closes(self) -> bool:
        same = self._run[:1] == self._fence[:1] and len(self._run) >= len(self._fence)
        return same and self._starts_line()

    def _end_run(self) -> None:
        if not self._run:
            return
        if self._fence and self._opening_line and self._fence[0] == self._run[0] == "`":
            self._fence = (
                ""  # the first line of a fence has no further backticks: it was inline code
            )
        elif self._fence:
            self._closing = self._run_closes()
        elif self._starts_line() and len(self._run) >= 3:
            self._fence, self._opening_line = self._run, True
        elif self._run[0] == "`":
            length = len(self._run)
            self._inline = 0 if self._inline == length else self._inline or length
        self._run = ""
        self._line_is_blank = False
