"""What guesses the next tokens of the sequences of a batch, and for how many it is asked.

`LookupGuesser` guesses that a sequence continues as it did before, where its latest tokens stood
once already: prompt lookup, as in https://arxiv.org/abs/2304.04487. No model is needed, and it pays
where an answer quotes or repeats: editing, summaries, code, records.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import mlx.core as mx

NGRAM_SIZES = (3, 2, 1)  # tokens, the longest match first
CHUNK = 2048  # tokens indexed in one call; about 2 ms

_FIRST_LENGTH = 2  # guesses at the start of a sequence
_SHORTEST_REST = 4  # tokens
_LONGEST_REST = 16
_WRONG = 2  # attempts in a row whose first guess was wrong, after which to rest
_EMPTY = 4  # the same for attempts that had nothing to propose, which cost less


@dataclass(frozen=True, slots=True)
class Asked:
    """A sequence that guesses are wanted for.

    tokens: the whole prompt and output; from call to call they only grow, by any number. most:
    guesses, at least 1. states: [n, size], those from which the model chose the last n of the
    tokens; None where they are not known.
    """

    sequence: int
    tokens: Sequence[int]
    most: int
    states: mx.array | None = None


class Guesser(Protocol):
    """Guesses for the sequences of one batch. It decides speed, never output."""

    def propose(self, asked: Sequence[Asked]) -> list[list[int] | None]:
        """Guesses for what follows each sequence; [] for none, None: it has yet to catch up.

        Takes bounded time however long the sequences are.
        """
        ...

    def forget(self, sequences: Collection[int]) -> None:
        """These sequences have left."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of MLX arrays that it keeps from step to step."""
        ...


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


class LookupGuesser:
    """A `Guesser` by prompt lookup. Costs O(most) per sequence, plus CHUNK while it catches up."""

    nbytes = 0

    def __init__(self) -> None:
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, asked: Sequence[Asked]) -> list[list[int] | None]:
        return [self._guesses(one) for one in asked]

    def forget(self, sequences: Collection[int]) -> None:
        for sequence in sequences:
            self._indices.pop(sequence, None)

    def _guesses(self, one: Asked) -> list[int]:
        index = self._indices.setdefault(one.sequence, NgramIndex())
        index.extend(one.tokens)
        place = index.follow(one.tokens)
        return [] if place is None else continued(one.tokens, place, one.most)


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
