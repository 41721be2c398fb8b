"""Log-probabilities of sampled tokens, for the rows whose requests ask for them.

They are those of the model's own distribution: the log-softmax of its logits in float32, before
bias, penalties, grammar, filters and temperature, like OpenAI's `logprobs` and vLLM's
`raw_logprobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from backend.engine.events import TokenLogprob
from backend.engine.sampling.subset import Subset


@dataclass(slots=True)
class SampledLogprobs:
    """The log-probabilities of one step's tokens, not yet read from the device.

    n is the number of rows with log-probabilities. chosen: [n], of the sampled tokens. top,
    top_values: [n, alternatives], the likeliest tokens and their log-probabilities, unsorted.
    """

    chosen: mx.array
    top: mx.array
    top_values: mx.array

    @property
    def arrays(self) -> list[mx.array]:
        return [self.chosen, self.top, self.top_values]


class BatchLogprobs:
    """Log-probabilities for a fixed set of rows.

    counts: per row, the number of alternatives; None for rows without log-probabilities.
    """

    def __init__(self, counts: Sequence[int | None]) -> None:
        self._counts = counts
        self._asking = Subset(
            [at for at, count in enumerate(counts) if count is not None],
            len(counts),
        )
        self._most = max((count for count in counts if count is not None), default=0)

    def __bool__(self) -> bool:
        return bool(self._asking)

    def __call__(self, logits: mx.array, tokens: mx.array) -> SampledLogprobs:
        """Compute the log-probabilities of one step.

        logits: [rows, vocabulary], as the model returned them. tokens: [rows], as sampled.
        """
        own = self._asking.of(logits).astype(mx.float32)
        values = own - mx.logsumexp(own, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(values, self._asking.of(tokens)[:, None], axis=-1)[:, 0]
        most = min(self._most, values.shape[-1])
        if not most:
            empty = mx.zeros((values.shape[0], 0))
            return SampledLogprobs(chosen, empty.astype(mx.uint32), empty)
        top = mx.argpartition(-values, kth=most - 1, axis=-1)[:, :most]
        return SampledLogprobs(chosen, top, mx.take_along_axis(values, top, axis=-1))

    def read(self, sampled: SampledLogprobs, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """The log-probabilities by row, for the rows that have any."""
        chosen = cast(list[float], sampled.chosen.tolist())
        top_tokens = cast(list[list[int]], sampled.top.tolist())
        top_values = cast(list[list[float]], sampled.top_values.tolist())
        rows = zip(self._asking.places, chosen, top_tokens, top_values, strict=True)
        return {
            at: TokenLogprob(tokens[at], value, _ranked(top, values, self._counts[at] or 0))
            for at, value, top, values in rows
        }


def _ranked(
    tokens: Sequence[int], values: Sequence[float], count: int
) -> tuple[tuple[int, float], ...]:
    """The `count` most likely tokens, best first; equal ones by id."""
    pairs = sorted(zip(tokens, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(pairs[:count])
