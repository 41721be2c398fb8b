"""The closed set of things that a generation tells its owner, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Running totals of one generation.

    prompt_tokens: the whole prompt, cached part included.
    cached_tokens: how many of them a stored KV cache served.
    completion_tokens: generated tokens, without the end-of-sequence token.
    prefill_ms: from the row's admission to its first token. decode_ms: from there on.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability, and the likeliest tokens in its place with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log-probabilities of a prompt's tokens; the first has none, so it is only named."""

    first: int
    rest: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of text: never empty, whole characters only, never part of a stop string.

    logprobs: of the tokens since the piece before, where the request asked for them.
    joined: where several pieces were made one, the text of each and the completion tokens by then.
    """

    text: str
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    joined: tuple[tuple[str, int], ...] = ()

    @property
    def pieces(self) -> tuple[tuple[str, int], ...]:
        """The pieces as they were generated, each with the completion tokens by then."""
        return self.joined or ((self.text, self.usage.completion_tokens),)


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a generation that went well.

    stop_sequence: the stop string that ended the text, '' where something else did.
    logprobs: one entry per counted token where the request asked for them, else None.
    prompt_logprobs: likewise for the prompt. scores: of a Score, per candidate in its order, the
    candidate's tokens. repeated: whether the guard against endless repetition ended it.
    """

    reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_sequence: str = ""
    prompt_logprobs: PromptLogprobs | None = None
    scores: tuple[tuple[TokenLogprob, ...], ...] = ()
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of the prompt is computed: sent before the first text, on request.

    The first comes when the prompt is known to be served, before it has a slot. processed: prompt
    tokens with KV, the cached part included.
    """

    usage: Usage
    processed: int = 0
    text: ClassVar[str] = ""


Event = Progress | TextDelta | Finished
