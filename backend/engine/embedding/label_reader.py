"""Splits a text of any length into rows for TokenClassify, and turns labels into entities.

A row is a window, at most as long as the model's context. Windows overlap. A token's label comes
from the window in which the token is further from an edge, so that it has context on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from backend.engine.embedding.encoding import Encoded, Piece
from backend.engine.embedding.entities import (
    Entity,
    Run,
    entities_of,
    parted,
    runs_of,
)
from backend.engine.embedding.readers import Limits

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Window:
    """A row with the tokens `first` to `last` of a text. Labels of `kept` to `until` are used.

    Both ranges are half-open.
    """

    first: int
    last: int
    kept: int
    until: int


def windows(length: int, size: int) -> list[Window]:
    """Return the windows of a text of `length` tokens, each of at most `size` tokens.

    Neighbouring windows overlap by a quarter of `size`. Each token's label comes from one window.
    """
    if length <= size:
        return [Window(0, length, 0, length)] if length else []
    shared = size // 4
    firsts = list(range(0, length - shared, size - shared))
    edges = [first + shared // 2 for first in firsts[1:]]
    lasts = [min(first + size, length) for first in firsts]
    return [
        Window(*bounds) for bounds in zip(firsts, lasts, [0, *edges], [*edges, length], strict=True)
    ]


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A tokenised text and its rows."""

    text: str
    pieces: list[Piece]
    windows: list[Window]
    offsets: list[tuple[int, int]]  # the character range of each token, half-open
    # The index of each token's word; None for a token that belongs to no word.
    words: list[int | None]


@dataclass(frozen=True)
class LabelReader:
    """Reads texts for token classification, and turns the model's output into entities.

    tokenizer: a tokenizers.Tokenizer.
    labels: the names of labels, in the order of the model's outputs.
    path: returns the label index of each token, given probabilities, (tokens, labels).
    before, after: token ids at the beginning and at the end of every row.
    by_word: whether all tokens of a word have the same label.
    """

    rpc: ClassVar[str] = "TokenClassify"
    tokenizer: Any
    limits: Limits
    labels: tuple[str, ...]
    path: Callable[[np.ndarray], Sequence[int]]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    by_word: bool = True

    def read(self, text: str) -> LabelledText:
        """Tokenise a text. Raises TooLong, InvalidRequest."""
        self.limits.bounded("text", text, truncate=False)
        row = self.tokenizer.encode(text, add_special_tokens=False)
        self.limits.check_known("text", row.ids)
        parts = windows(len(row.ids), self.limits.context - len(self.before) - len(self.after))
        ids = [[*self.before, *row.ids[part.first : part.last], *self.after] for part in parts]
        return LabelledText(
            text=text,
            pieces=list(map(Piece, ids)),
            windows=parts,
            offsets=list(row.offsets),
            words=list(row.word_ids),
        )

    def answer(self, read: LabelledText, encoded: Encoded, threshold: float) -> list[Entity]:
        """Return the entities with a score of at least `threshold`, in the order of the text."""
        import numpy as np

        if not read.pieces:
            return []
        shares = np.concatenate(
            [
                output[len(self.before) :][part.kept - part.first : part.until - part.first]
                for part, output in zip(read.windows, encoded.outputs, strict=True)
            ]
        )
        labels = [self.labels[index] for index in self.path(shares)]
        runs = runs_of(labels, read.words if self.by_word else ())
        scores = [self._score(shares, run) for run in runs]
        found = entities_of(read.text, runs, read.offsets, scores)
        return [entity for entity in found if entity.score >= threshold]

    def _score(self, shares: np.ndarray, run: Run) -> float:
        """Return the mean probability that the run's tokens belong to its group."""
        columns = [
            index for index, label in enumerate(self.labels) if parted(label)[1] == run.group
        ]
        return float(shares[run.first : run.last, columns].sum(axis=1).mean())
