"""Drafters of the next tokens of a batch's sequences, and how many tokens to draft.

`LookupDrafter` does prompt lookup, as in https://arxiv.org/abs/2304.04487: if the latest tokens of
a sequence occurred in it before, it proposes the tokens that followed then. It needs no model, and
saves time if an answer quotes or repeats: editing, summaries, code, records.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from backend.engine.drafting.hidden_states import UnreadStates

NGRAM_SIZES = (3, 2, 1)  # tokens, the longest match first
CHUNK = 2048  # tokens indexed in one call; about 2 ms

_FIRST_LENGTH = 2  # draft tokens at the start of a sequence
_SHORTEST_PAUSE = 4  # tokens
_LONGEST_PAUSE = 16
_WRONG = 2  # consecutive attempts with a wrong first draft token, before a pause
_EMPTY = 4  # consecutive attempts without a draft token, which cost less, before a pause


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence for which draft tokens are requested."""

    sequence: int
    tokens: Sequence[int]  # prompt and output. Between calls, tokens are only appended.
    most: int  # maximum number of draft tokens, at least 1
    # The hidden states from which the model chose the latest tokens, for drafters that read hidden
    # states; None if they are not collected.
    states: UnreadStates | None = None


class Drafter(Protocol):
    """Drafts tokens for the sequences of one batch, which affects speed, never output."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int] | None]:
        """Return each sequence's draft tokens; [] for none, None while the drafter catches up.

        The time is limited, whatever the lengths of the sequences.
        """
        ...

    def forget(self, sequences: Collection[int]) -> None: ...

    @property
    def nbytes(self) -> int:
        """Bytes of MLX arrays that the drafter stores between steps."""
        ...


class DraftLength:
    """The number of tokens to draft for a sequence, learnt from its earlier draft tokens.

    The number doubles if all draft tokens were right, becomes one more than were right if some
    were, and halves if none was. Repeated failures cause a pause, counted in the sequence's tokens,
    so steps without draft tokens need not be recorded. Pauses double while attempts fail, so
    unpredictable text costs one short attempt in 16 tokens.
    """

    def __init__(self) -> None:
        self._length = _FIRST_LENGTH
        self._wrong = self._empty = 0
        self._pause_tokens = 0
        self._attempt = 0  # number of tokens at the latest attempt
        self._resume = 0

    def ready(self, length: int) -> bool:
        """Return whether another attempt is worthwhile when the sequence has `length` tokens."""
        return length >= self._resume

    def begin(self, length: int, most: int) -> int:
        """Begin an attempt at this length, and return how many tokens to draft, 0 to `most`."""
        self._attempt = length
        return min(self._length, most) if self.ready(length) else 0

    def record_none(self) -> None:
        """Record that the drafter had no draft tokens."""
        self._empty += 1
        if self._empty >= _EMPTY:
            self._pause()

    def record(self, proposed: int, accepted: int) -> None:
        """Record that the first `accepted` of `proposed` draft tokens, at least one, were right."""
        self._empty = 0
        if not accepted:
            self._length = max(self._length // 2, 1)
            self._wrong += 1
            if self._wrong >= _WRONG:
                self._pause()
            return
        self._wrong = 0
        self._pause_tokens //= 2
        if accepted < proposed:
            self._length = accepted + 1
        elif proposed >= self._length:
            self._length *= 2

    def _pause(self) -> None:
        self._pause_tokens = min(max(2 * self._pause_tokens, _SHORTEST_PAUSE), _LONGEST_PAUSE)
        self._resume = self._attempt + self._pause_tokens


class LookupDrafter:
    """A `Drafter` by prompt lookup.

    A call indexes at most CHUNK tokens of each sequence, so a long prompt is indexed in several
    calls.
    """

    nbytes = 0

    def __init__(self) -> None:
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int] | None]:
        return [self._drafts(request) for request in requests]

    def forget(self, sequences: Collection[int]) -> None:
        for sequence in sequences:
            self._indices.pop(sequence, None)

    def _drafts(self, request: DraftRequest) -> list[int]:
        index = self._indices.setdefault(request.sequence, NgramIndex())
        index.extend(request.tokens)
        position = index.follow(request.tokens)
        return [] if position is None else continued(request.tokens, position, request.most)


class NgramIndex:
    """The latest position of every n-gram in a growing list of tokens."""

    def __init__(self, sizes: Sequence[int] = NGRAM_SIZES) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {
            size: {} for size in sorted(sizes, reverse=True)
        }
        self._known = 1

    def extend(self, tokens: Sequence[int], most: int = CHUNK) -> None:
        """Index up to `most` new tokens at the end of `tokens`.

        An n-gram is indexed once a token follows it, so the end of the list never matches itself.
        """
        stop = min(len(tokens), self._known + most)
        for size, ends in self._ends.items():
            for end in range(max(self._known, size), stop):
                ends[tuple(tokens[end - size : end])] = end
        self._known = max(self._known, stop)

    def follow(self, tokens: Sequence[int]) -> int | None:
        """Return the position after the last known occurrence of the end of `tokens`, or None.

        The longest n-gram at the end that is known counts.
        """
        for size, ends in self._ends.items():
            if len(tokens) >= size and (end := ends.get(tuple(tokens[-size:]))) is not None:
                return end
        return None


def continued(tokens: Sequence[int], position: int, count: int) -> list[int]:
    """Return `count` tokens from `position` on, repeated as often as needed."""
    found = list(tokens[position : position + count])
    period = len(found)
    found.extend(found[at % period] for at in range(period, count))
    return found
