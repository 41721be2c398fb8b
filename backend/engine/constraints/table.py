"""What llguidance knows of a model's tokens, and how a grammar names those that are special."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np

from backend.engine.constraints.constraint import bits_of, words
from backend.engine.errors import InvalidRequest


@dataclass(frozen=True, eq=False, slots=True)
class TokenTable:
    """Built once per model: it takes about a second for 50,000 tokens.

    known: mask of the ids that model and tokenizer both have; ends: of those that end an answer.
    special: ids of the special tokens by their text. A grammar's own text never matches those.
    """

    tokens: llguidance.LLTokenizer
    vocabulary_size: int
    known: np.ndarray
    ends: np.ndarray
    special: dict[str, int]
    _special_text: re.Pattern[str]

    @classmethod
    def of(cls, tokenizer: Any, vocabulary_size: int, end_tokens: Collection[int]) -> TokenTable:
        """Raises InvalidRequest for a tokenizer that cannot be taken apart."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InvalidRequest(
                "this model's tokenizer is of a kind for which answers cannot be constrained"
            )
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        known = max(vocabulary.values(), default=-1) + 1
        ends = sorted(token for token in end_tokens if token < min(known, vocabulary_size))
        size = max(known, vocabulary_size) + (not ends)
        try:
            tokens = llguidance.LLTokenizer(
                backend.to_str(), n_vocab=size, eos_token=ends or [size - 1]
            )
        except ValueError as fault:
            raise InvalidRequest(
                "answers of this model cannot be constrained: its tokenizer is of an unknown kind"
                f" ({str(fault).splitlines()[0][:120]})"
            ) from None
        special = {
            text: token
            for text, token in vocabulary.items()
            if text and token < vocabulary_size and tokens.is_special_token(token)
        }
        longest_first = sorted(special, key=len, reverse=True)
        length = words(vocabulary_size)
        return cls(
            tokens,
            vocabulary_size,
            bits_of(sorted({t for t in vocabulary.values() if t < vocabulary_size}), length),
            bits_of(ends, length),
            special,
            re.compile("|".join(map(re.escape, longest_first)) or r"(?!)"),
        )

    def pieces(self, text: str) -> list[str | int]:
        """A marker as texts, and the ids of the special tokens that are in it."""
        found: list[str | int] = []
        start = 0
        for match in self._special_text.finditer(text):
            found += [text[start : match.start()], self.special[match.group()]]
            start = match.end()
        return [piece for piece in [*found, text[start:]] if piece != ""]

    def lark(self, text: str) -> str:
        """A marker as Lark: a sequence for a rule, not for a terminal."""
        return " ".join(
            f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)
            for piece in self.pieces(text)
        )

    def has(self, text: str) -> bool:
        """Whether a text is one token of this model, a special one."""
        return text in self.special
