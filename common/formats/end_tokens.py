"""Drops what models write around tokens, from text that is still arriving.

The token that ends a model's turn comes as text at the end of the answer if the checkpoint's
configuration does not name it as a special one. White space between a mark and the word that
belongs to it means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache

from common.formats.cursor import END_TOKENS, STRUCK_END, Markers, markers_of

_LONGEST = 200
"""The most characters between a mark and its end."""
_STRUCK = re.compile(r"<s[ >]")  # HTML that crosses text out also ends with </s>


@cache
def _ends_beside(own: frozenset[str]) -> Markers:
    """Return the tokens that end a turn and are no markers of the family."""
    return Markers(token for token in END_TOKENS if token not in own)


class EndTokens:
    """Holds back what may be the end of the answer.

    own: the family's markers, which its grammar reads.
    """

    def __init__(self, own: Collection[str]) -> None:
        self._ends = _ends_beside(frozenset(own))
        self._tokens: list[str] = []  # tokens, and space after them
        self._begun = ""  # the beginning of another one
        self._latest = ""
        self._struck = False

    @property
    def held(self) -> str:
        """The text that is held back."""
        return "".join(self._tokens) + self._begun

    def feed(self, text: str) -> str:
        """Accept the next piece of text. Returns the text that does not belong to the end."""
        opens = self._ends.may_begin(text)
        if not (opens or self._begun or self._tokens or self._latest):  # nearly always
            return text
        self._struck = self._struck or bool(_STRUCK.search(self._latest + text))
        self._latest = (self._latest + text)[-2:] if "<" in (self._latest + text)[-2:] else ""
        if not (opens or self._begun or self._tokens):
            return text
        text = self._begun + text
        if self._tokens and self._tokens[-1].endswith("["):  # perhaps the beginning of another
            text = self._tokens.pop() + text
        start, self._begun = self._first_token(text), ""
        if start == len(text):
            end = self._ends.open_end(text)
            text, self._begun = text[:end], text[end:]
            start = self._first_token(text)
        before = ""
        if text[:start].strip() or not self._tokens:
            before, self._tokens = "".join(self._tokens) + text[:start], []
            text = text[start:]
        self._tokens += filter(None, (text[:-4], text[-4:]))
        return before

    def finish(self) -> str:
        """End the answer. Returns the text that was held back and is a part of it."""
        return self.held if self._begun else ""

    def _first_token(self, text: str) -> int:
        """Return where the tokens begin with which the text ends; its length if there are none."""
        start = end = len(text)
        while True:
            while end and text[end - 1].isspace():
                end -= 1
            if not text.endswith(self._ends.literals, 0, end):
                return start
            token = next(each for each in self._ends.literals if text.endswith(each, 0, end))
            if token == STRUCK_END and self._struck:
                return start
            start = end = end - len(token)


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
