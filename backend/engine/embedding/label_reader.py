"""Splits a text of any length into rows for TokenClassify, and turns labels into entities.

A row is a window, at most as long as the model's context. Windows overlap. A token's label comes
from the window in which the token is further from an edge, so that it has context on both sides.

Labels are tags of BIO and BIOES: `B-` begins an entity, `I-` continues and `E-` ends the entity,
`S-` is an entity of one token, and `O` is no entity. A label without such a mark is only a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from backend.engine.embedding.encoding import Encoded, Piece
from backend.engine.embedding.readers import Limits

if TYPE_CHECKING:
    import numpy as np

OUTSIDE = "O"
_MARKS = ("B", "I", "E", "S")


@dataclass(frozen=True, slots=True)
class Entity:
    """A named entity."""

    group: str  # the type of the entity, such as PER
    # Byte offsets into the text in UTF-8, half-open.
    start: int
    end: int
    score: float  # the model's confidence, from 0 to 1
    text: str  # the characters of the entity


@dataclass(frozen=True, slots=True)
class Run:
    """The tokens of one entity, from `first` up to but not including `last`."""

    group: str
    first: int
    last: int


def parted(label: str) -> tuple[str, str]:
    """Return a label's mark and group: `B-PER` → B, PER; `PER` → I, PER; `O` → "", O."""
    if label == OUTSIDE:
        return "", OUTSIDE
    mark, dash, group = label.partition("-")
    return (mark, group) if dash and group and mark in _MARKS else ("I", label)


def runs_of(labels: Sequence[str], words: Sequence[int | None] = ()) -> list[Run]:
    """Return the entities as runs of tokens: in order, none empty, none overlapping.

    All tokens of a word have the label of its first labelled token. A word of several tokens, such
    as `San`, `##ti`, `##ago`, is therefore in one entity.

    words: the index of each token's word; None for a token that belongs to no word. If there are no
        indices, each token is a word.
    """
    runs: list[Run] = []
    group, first = OUTSIDE, 0

    def close(here: int) -> None:
        nonlocal group
        if group != OUTSIDE:
            runs.append(Run(group, first, here))
        group = OUTSIDE

    for start, end in _words(words or range(len(labels))):
        label = next((label for label in labels[start:end] if label != OUTSIDE), OUTSIDE)
        mark, named = parted(label)
        if named != group or mark in ("B", "S"):
            close(start)
            group, first = named, start
        if mark in ("E", "S"):
            close(end)
    close(len(labels))
    return runs


def _words(words: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    start = 0
    for end in range(1, len(words) + 1):
        if end == len(words) or words[end] is None or words[end] != words[start]:
            yield start, end
            start = end


def entities_of(
    text: str, runs: Sequence[Run], offsets: Sequence[tuple[int, int]], scores: Sequence[float]
) -> list[Entity]:
    """Return runs as entities, without white space at the ends and without overlaps.

    offsets: the character range of each token, half-open.
    """
    bytes_before = [0, *accumulate(len(character.encode()) for character in text)]
    found: list[Entity] = []
    reached = 0
    for run, score in zip(runs, scores, strict=True):
        part = text[offsets[run.first][0] : offsets[run.last - 1][1]]
        start = offsets[run.first][0] + len(part) - len(part.lstrip())
        part = part.strip()
        if not part or start < reached:  # tokens of one character have the same range
            continue
        reached = start + len(part)
        found.append(Entity(run.group, bytes_before[start], bytes_before[reached], score, part))
    return found


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
    """Reads texts for token classification, and turns the model's output into entities."""

    rpc: ClassVar[str] = "TokenClassify"
    tokenizer: Any  # a tokenizers.Tokenizer
    limits: Limits
    labels: tuple[str, ...]  # the names of labels, in the order of the model's outputs
    # Returns the label index of each token, given probabilities, (tokens, labels).
    path: Callable[[np.ndarray], Sequence[int]]
    # Token ids at the beginning and at the end of every row.
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    by_word: bool = True  # whether all tokens of a word have the same label

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
