"""Turns token labels into named entities.

Labels are tags of BIO and BIOES: `B-` begins an entity, `I-` continues and `E-` ends the entity,
`S-` is an entity of one token, and `O` is no entity. A label without such a mark is only a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

OUTSIDE = "O"
_MARKS = ("B", "I", "E", "S")


@dataclass(frozen=True, slots=True)
class Entity:
    """A named entity.

    group: the type of the entity, such as PER.
    start, end: byte offsets into the text in UTF-8, half-open.
    score: the model's confidence, from 0 to 1.
    text: the characters of the entity.
    """

    group: str
    start: int
    end: int
    score: float
    text: str


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
    """Return the range of each word's tokens, half-open."""
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
    scores: the score of each run.
    """
    bytes_before = [0, *accumulate(len(character.encode()) for character in text)]
    found: list[Entity] = []
    reached = 0
    for run, score in zip(runs, scores, strict=True):
        start, end = offsets[run.first][0], offsets[run.last - 1][1]
        while start < end and text[start].isspace():
            start += 1
        while end > start and text[end - 1].isspace():
            end -= 1
        if start >= end or start < reached:  # tokens of one character have the same range
            continue
        reached = end
        found.append(
            Entity(run.group, bytes_before[start], bytes_before[end], score, text[start:end])
        )
    return found
