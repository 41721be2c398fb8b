"""Drops the white space that a model writes between a mark and the word that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping

from common.formats.cursor import markers_of

_LONGEST = 200
"""The most characters between a mark and its end."""


class TightMarks:
    """Holds back a tag that consists of a mark, a word and an end until it is complete.

    ends: the text that ends a tag, by the mark with which the tag begins.
    """

    def __init__(self, ends: Mapping[str, str]) -> None:
        self._ends = ends
        self._marks = markers_of(*ends)
        self.held = ""
        """The text that is held back."""

    def feed(self, text: str) -> str:
        """Accept the next piece of text. Returns it without white space at the edges of tags."""
        if not self._ends:
            return text
        text, at = self.held + text, 0
        found: list[str] = []
        while True:
            start, mark = self._marks.find(text, at, ended=False)
            found.append(text[at:start])
            if not mark:
                break
            inside = start + len(mark)
            limit = inside + _LONGEST + len(self._ends[mark])
            at = text.find(self._ends[mark], inside, limit)
            another = self._marks.find(text[:limit] if at < 0 else text[:at], inside, ended=True)[1]
            if at < 0 and not another and len(text) < limit:
                break
            at = inside if at < 0 or another else at
            found += (mark, text[inside:at].strip())
        self.held = text[start:]
        return "".join(found)

    def finish(self) -> str:
        """End the answer. Returns the text that was held back."""
        held, self.held = self.held, ""
        return held
