"""The state of one constrained row: which tokens may come next."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
import numpy as np

from backend.engine.errors import EngineError, EngineFailed, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher

_log = logging.getLogger(__name__)

_BITS = 32
BURST_SECONDS = 0.5
TOKEN_SECONDS = 0.01
"""Processor time that a row's grammar may take: BURST_SECONDS in all, plus TOKEN_SECONDS for each
token. The time is limited because every row of the batch waits for the grammar."""
_AMBIGUOUS = (
    "the text can be parsed in too many ways: make the grammar less ambiguous, or give it fewer"
    " alternatives and optional parts"
)
_LEXER = "its regular expressions are too complex: simplify them, or use fewer"
_DEAD_END = "no text can follow there: look for a rule or pattern that matches nothing"
_RANGE = "one of its numbers has too many digits: use at most 18"
_CAUSES = {
    "items": _AMBIGUOUS,
    "lexer error": _LEXER,
    "fuel": _LEXER,
    "NoExtension": _DEAD_END,
    "regex for integer range": _RANGE,
    "number out of range": _RANGE,
}
"""Phrases of llguidance's errors that the grammar causes, and the message for the client."""


def cause_in(error: str) -> str | None:
    """Return the message for an error of llguidance that the grammar causes, else None."""
    return next((why for phrase, why in _CAUSES.items() if phrase in error), None)


def words(vocabulary_size: int) -> int:
    """Return the length, in uint32 words, of a mask with one bit per token id."""
    return -(-vocabulary_size // _BITS)


def bits_of(tokens: list[int], length: int) -> np.ndarray:
    """Return a mask of `length` words in which the bits of these tokens are set."""
    mask = np.zeros(length, np.uint32)
    ids = np.asarray(tokens, np.int64)
    np.bitwise_or.at(mask, ids // _BITS, np.left_shift(np.uint32(1), (ids % _BITS).astype("u4")))
    return mask


def masked(logits: mx.array, allowed: mx.array) -> mx.array:
    """Return the logits, with -inf for tokens that are not allowed.

    logits: [rows, vocabulary], any float type.
    allowed: [rows, words] uint32, one bit per token id, the lowest bit of a word first.
    """
    rows, vocabulary = logits.shape
    bits = (allowed[:, :, None] >> mx.arange(_BITS, dtype=mx.uint32)) & 1
    keep = bits.astype(mx.bool_).reshape(rows, -1)[:, :vocabulary]
    return mx.where(keep, logits, mx.array(-mx.inf, dtype=logits.dtype))


class AnswerRule(Protocol):
    """Decides which tokens may continue an answer."""

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, so that only an end token may follow."""

    def restart(self, tokens: Sequence[int]) -> None:
        """Reset, then accept the tokens that were delivered so far."""

    def fill(self, allowed: np.ndarray) -> None:
        """Write the mask of the tokens allowed next: uint32, shape [words(vocabulary)]."""

    def accept(self, token: int) -> None:
        """Advance by a sampled token."""

    def look_ahead(self, draft_tokens: Sequence[int], allowed: np.ndarray) -> int:
        """Write the mask after each draft token: uint32, shape [draft tokens, words(vocabulary)].

        Returns the number of masks written. The masks end after a token that completes the answer,
        and before a token that is not allowed or would take too much time. The state does not
        change.
        """


@dataclass(eq=False, frozen=True, slots=True, weakref_slot=True)
class Compiled:
    """A matcher in its initial state, and the bytes of memory that it uses.

    Rows use copies of the matcher, which share most of that memory.
    """

    matcher: LLMatcher
    bytes: int


@dataclass(eq=False, slots=True)
class Constraint:
    """The constraint of one row, created on a prompt thread and used by the engine thread."""

    matcher: LLMatcher  # llguidance's matcher, at the start of the answer
    known: np.ndarray  # mask of the ids that both the model and the tokenizer have
    ends: np.ndarray  # mask of the end tokens. Both masks are read-only and shared between rows.
    scratch_words: int  # length of the matcher's own mask, at least that of `known`
    # The compiled grammar of which the matcher is a copy. Its memory counts as used while the row
    # exists.
    source: Compiled
    _scratch: np.ndarray = field(init=False)
    _accepted: list[int] = field(init=False, default_factory=list)
    allowance: float = BURST_SECONDS  # seconds of processor time that the grammar may still take

    def __post_init__(self) -> None:
        self._scratch = np.zeros(self.scratch_words, np.uint32)

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, so that only an end token may follow."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def restart(self, tokens: Sequence[int]) -> None:
        """Reset, then accept the tokens that were delivered so far.

        A failed step may have advanced the grammar by a token that was not delivered. If the
        grammar has accepted exactly these tokens, nothing is done.
        """
        if self._accepted == list(tokens):
            return
        # A new copy and not `reset`, which some grammars do not support (max_tokens, stop).
        self.matcher = self.source.matcher.deep_copy()
        self._accepted.clear()
        for token in tokens:
            self.accept(token)

    def fill(self, allowed: np.ndarray) -> None:
        """Write the mask of the tokens allowed next: uint32, shape [words(vocabulary)].

        End tokens are allowed if and only if the grammar accepts the text so far. Raises
        InvalidRequest if the grammar takes too much time or allows no token.
        """
        if self.ended:
            allowed[:] = self.ends
            return
        with self._timed():
            self.matcher.unsafe_compute_mask_ptr(self._scratch.ctypes.data, self._scratch.nbytes)
        self._check()
        np.bitwise_and(self._scratch[: len(allowed)], self.known, out=allowed)
        if self.matcher.is_accepting():
            allowed |= self.ends
        else:
            allowed &= ~self.ends
        if not allowed.any():
            raise InvalidRequest(
                "the grammar allows none of this model's tokens next: allow other text there"
            )

    def accept(self, token: int) -> None:
        """Advance by a sampled token. Raises EngineFailed if the grammar does not allow it."""
        if self.ended:
            return
        self.allowance += TOKEN_SECONDS
        with self._timed():
            allowed = self.matcher.consume_token(token)
        if not allowed:
            self._check()
            raise EngineFailed(f"the grammar does not allow the token {token}")
        self._accepted.append(token)

    def look_ahead(self, draft_tokens: Sequence[int], allowed: np.ndarray) -> int:
        """Write the mask after each draft token, as in `AnswerRule`.

        Each draft token may take the processor time of one token, which does not count for
        `allowance`.
        """
        ahead = replace(self, matcher=self.matcher.deep_copy(), allowance=TOKEN_SECONDS)
        written = 0
        try:
            known = list(takewhile(self._knows, draft_tokens))
            with ahead._timed():
                possible = ahead.matcher.validate_tokens(known)
            for token, mask in zip(known[:possible], allowed, strict=False):
                ahead.accept(token)
                if not ahead.ended:
                    ahead.fill(mask)
                written += 1
                if ahead.ended:
                    break
        except EngineError as fault:
            _log.debug("a grammar cannot check further draft tokens: %s", fault)
        return written

    def _knows(self, token: int) -> bool:
        word, bit = divmod(token, _BITS)
        return word < len(self.known) and bool(self.known[word] >> bit & 1)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.thread_time()
        yield
        self.allowance -= time.thread_time() - started
        if self.allowance < 0:
            raise InvalidRequest(
                f"following the grammar takes more than {1000 * TOKEN_SECONDS:g} ms per token,"
                f" because {_AMBIGUOUS}"
            )

    def _check(self) -> None:
        if not self.matcher.is_error():
            return
        error = self.matcher.get_error()
        if (why := cause_in(error)) is not None:
            raise InvalidRequest(f"the grammar cannot be followed any further, because {why}")
        raise EngineFailed(
            f"the grammar could not be followed any further: {error.splitlines()[0][:200]}"
        )
