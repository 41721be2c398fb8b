"""Guesses that a row goes on as it did before, where its latest tokens stood once already.

Prompt lookup, as in https://arxiv.org/abs/2304.04487: no model is needed, and it pays where an
answer quotes or repeats: editing, summaries, code, records.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.drafting.length import DraftLength

SIZES = (3, 2, 1)  # tokens of an n-gram, the longest match first
CHUNK = 2048  # tokens indexed in one call; about 2 ms


class NgramIndex:
    """Where every n-gram of a growing list of tokens stood last."""

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {
            size: {} for size in sorted(sizes, reverse=True)
        }
        self._known = 1

    def extend(self, tokens: Sequence[int], most: int = CHUNK) -> None:
        """Take in up to `most` tokens that are new at the end of `tokens`.

        An n-gram is entered once a token follows it, so the end of the list never finds itself.
        """
        stop = min(len(tokens), self._known + most)
        for size, ends in self._ends.items():
            for end in range(max(self._known, size), stop):
                ends[tuple(tokens[end - size : end])] = end
        self._known = max(self._known, stop)

    def follow(self, tokens: Sequence[int]) -> int | None:
        """The place after the latest earlier occurrence of the longest known end of `tokens`."""
        for size, ends in self._ends.items():
            if len(tokens) >= size and (end := ends.get(tuple(tokens[-size:]))) is not None:
                return end
        return None


def continued(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on; past the end they go on with themselves, as a repeat does."""
    found = list(tokens[place : place + count])
    period = len(found)
    found.extend(found[at % period] for at in range(period, count))
    return found


class LookupDrafter:
    """A `Drafter` by prompt lookup. Costs O(most) per step, plus CHUNK while it catches up."""

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        self._sizes = sizes
        self.forget()

    def forget(self) -> None:
        self._index = NgramIndex(self._sizes)
        self._length = DraftLength()
        self._at = 0

    def ready(self, length: int) -> bool:
        return self._length.ready(length)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        self._at = len(tokens)
        self._index.extend(tokens)
        count = self._length.allowed(self._at, most)
        if not count:
            return []
        place = self._index.follow(tokens)
        if place is None:
            self._length.nothing(self._at)
            return []
        return continued(tokens, place, count)

    def told(self, proposed: int, accepted: int) -> None:
        self._length.told(self._at, proposed, accepted)
