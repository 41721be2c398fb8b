"""What guesses the next tokens of a sequence that decodes alone, and for how many it is asked.

`LookupDrafter` guesses that a sequence continues as it did before, where its latest tokens stood
once already: prompt lookup, as in https://arxiv.org/abs/2304.04487. No model is needed, and it pays
where an answer quotes or repeats: editing, summaries, code, records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

NGRAM_SIZES = (3, 2, 1)  # tokens, the longest match first
CHUNK = 2048  # tokens indexed in one call; about 2 ms

_FIRST_LENGTH = 2  # guesses at the start of a sequence
_SHORTEST_REST = 4  # tokens
_LONGEST_REST = 16
_WRONG = 2  # attempts in a row whose first guess was wrong, after which to rest
_EMPTY = 4  # the same for attempts that had nothing to propose, which cost less


class Drafter(Protocol):
    """Follows one sequence.

    From call to call `tokens` only grows, by any number of tokens: steps without guesses are
    caught up with. A drafter decides speed, never output.
    """

    def ready(self, length: int) -> bool:
        """Whether it pays to ask when the sequence has `length` tokens.

        False after guesses that failed: the caller may take its plain, overlapped step, which
        does not wait for the latest token to be read.
        """
        ...

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` guesses for what follows the whole prompt and output; [] for none.

        Takes bounded time however long `tokens` is.
        """
        ...

    def record(self, proposed: int, accepted: int) -> None:
        """What became of the latest guesses: the first `accepted` of `proposed` were right."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of MLX arrays that it keeps from step to step."""
        ...


class FirstOf:
    """A `Drafter` that asks others in their order, the cheapest first, until one has a guess."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self._asked: Drafter | None = None

    def ready(self, length: int) -> bool:
        return any(drafter.ready(length) for drafter in self._drafters)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        for drafter in self._drafters:
            if guesses := drafter.propose(tokens, most):
                self._asked = drafter
                return guesses
        return []

    def record(self, proposed: int, accepted: int) -> None:
        if self._asked is not None:
            self._asked.record(proposed, accepted)

    @property
    def nbytes(self) -> int:
        return sum(drafter.nbytes for drafter in self._drafters)


class DraftLength:
    """How far to guess, learnt from what became of the guesses before.

    Longer after guesses that were all right, as long as what was right otherwise; a rest after
    failures. A rest is counted in tokens of the sequence, so plain steps in between need not be
    reported. Rests double while attempts keep failing: text that cannot be guessed then pays for
    one short attempt in 16 tokens.
    """

    def __init__(self) -> None:
        self._length = _FIRST_LENGTH
        self._wrong = self._empty = 0
        self._rest = 0
        self._attempt = 0  # tokens in the sequence at the latest attempt
        self._resume = 0

    def ready(self, length: int) -> bool:
        """Whether it pays to try when the sequence has `length` tokens."""
        return length >= self._resume

    def begin(self, length: int, most: int) -> int:
        """Begin an attempt at this length; returns the guesses to make, 0 to `most`."""
        self._attempt = length
        return min(self._length, most) if self.ready(length) else 0

    def record_none(self) -> None:
        """The attempt had nothing to propose."""
        self._empty += 1
        if self._empty >= _EMPTY:
            self._pause()

    def record(self, proposed: int, accepted: int) -> None:
        """The first `accepted` of `proposed` guesses, at least one, were right."""
        self._empty = 0
        if not accepted:
            self._length = max(self._length // 2, 1)
            self._wrong += 1
            if self._wrong >= _WRONG:
                self._pause()
            return
        self._wrong = 0
        self._rest //= 2
        if accepted < proposed:
            self._length = accepted + 1
        elif proposed >= self._length:
            self._length *= 2

    def _pause(self) -> None:
        self._rest = min(max(2 * self._rest, _SHORTEST_REST), _LONGEST_REST)
        self._resume = self._attempt + self._rest


class LookupDrafter:
    """A `Drafter` by prompt lookup. Costs O(most) per step, plus CHUNK while it catches up."""

    nbytes = 0

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._length = DraftLength()

    def ready(self, length: int) -> bool:
        return self._length.ready(length)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        self._index.extend(tokens)
        count = self._length.begin(len(tokens), most)
        if not count:
            return []
        place = self._index.follow(tokens)
        if place is None:
            self._length.record_none()
            return []
        return continued(tokens, place, count)

    def record(self, proposed: int, accepted: int) -> None:
        self._length.record(proposed, accepted)


class NgramIndex:
    """Where every n-gram of a growing list of tokens stood last."""

    def __init__(self, sizes: Sequence[int] = NGRAM_SIZES) -> None:
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
    """`count` tokens from `place` on; past the end they repeat from the start, as a loop does."""
    found = list(tokens[place : place + count])
    period = len(found)
    found.extend(found[at % period] for at in range(period, count))
    return found
