"""The events of a generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from backend.engine.embedding.encoding import Encoded
from backend.engine.speech.transcript import Transcribed

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Running totals of one generation.

    prompt_tokens: the whole prompt, including the cached part.
    cached_tokens: prompt tokens whose KV was already stored.
    completion_tokens: generated tokens, without the end-of-sequence token.
    prefill_ms: time from the sequence's admission to its first token.
    decode_ms: time since the first token.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability, and the likeliest tokens at this position with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log-probabilities of a prompt's tokens; the first token has none."""

    first: int
    rest: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of text: complete characters, never empty, never part of a stop string.

    logprobs: log-probabilities of the tokens since the last piece, if requested.
    joined: the text of each piece that was merged into this one, with the completion tokens after
        it; empty for a single piece.
    """

    text: str
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    joined: tuple[tuple[str, int], ...] = ()

    @classmethod
    def joining(
        cls, pieces: Sequence[tuple[str, int]], usage: Usage, logprobs: Sequence[TokenLogprob]
    ) -> TextDelta:
        """Join pieces that are delivered together."""
        text = "".join([text for text, _ in pieces])
        return cls(text, usage, tuple(logprobs), tuple(pieces) if len(pieces) > 1 else ())

    @property
    def pieces(self) -> tuple[tuple[str, int], ...]:
        """The pieces as they were generated, each with the completion tokens after it."""
        return self.joined or ((self.text, self.usage.completion_tokens),)


@dataclass(eq=False, slots=True)
class GrowingText:
    """Text of an answer that waits to be delivered; until then, later pieces are added to it.

    usage: returns the running totals.
    pieces, logprobs: as `TextDelta.joined` and `logprobs`.
    """

    usage: Callable[[], Usage]
    pieces: list[tuple[str, int]]
    logprobs: list[TokenLogprob]
    closed: bool = False

    def close(self) -> TextDelta:
        """Return the text as an event; later pieces need a new object."""
        self.closed = True
        return TextDelta.joining(self.pieces, self.usage(), self.logprobs)


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a successful generation.

    stop_sequence: the stop string that ended the text; '' if something else ended it.
    logprobs: log-probabilities of all completion tokens, if requested.
    prompt_logprobs: log-probabilities of the prompt's tokens, if requested.
    scores: for a Score, the scored tokens of each candidate.
    repeated: whether the repetition guard ended the answer.
    cut: whether a stop string, a stop token or the repetition guard ended the answer.
    """

    reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_sequence: str = ""
    prompt_logprobs: PromptLogprobs | None = None
    scores: tuple[tuple[TokenLogprob, ...], ...] = ()
    repeated: bool = False
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill progress, sent before the first text if requested.

    The first event is sent when the prompt has been tokenised, before the request has a slot.
    processed: prompt tokens whose KV exists, including cached tokens.
    """

    usage: Usage
    processed: int = 0
    text: ClassVar[str] = ""


Event = Progress | TextDelta | Transcribed | Finished
# what the engine thread publishes; it becomes an Event when it is delivered
Undelivered = Progress | GrowingText | Transcribed | Finished | Encoded
