"""Writes a model's special tokens in grammars, in a module that is cheap to import."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping


class SpecialTokens:
    """The special tokens of one model. Ordinary text in a grammar never matches them.

    ids: the ids of the special tokens, by text.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def pieces(self, text: str) -> list[str | int]:
        """Return a marker split into special tokens (as ids) and the text between them."""
        found: list[str | int] = []
        start = 0
        for match in self._pattern.finditer(text):
            found += [text[start : match.start()], self.ids[match.group()]]
            start = match.end()
        return [piece for piece in [*found, text[start:]] if piece != ""]

    def lark(self, text: str) -> str:
        """Return a marker as Lark symbols, for rules only: terminals cannot contain ids."""
        return " ".join(
            f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)
            for piece in self.pieces(text)
        )

    def has(self, text: str) -> bool:
        """Return whether a text is a single special token of this model."""
        return text in self.ids
