"""Log-probabilities of sampled tokens, for the rows whose requests ask for them.

They are the log-softmax of the model's logits in float32, before bias, penalties, grammar, filters
and temperature, like OpenAI's `logprobs` and vLLM's `raw_logprobs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from backend.engine.events import TokenLogprob
from backend.engine.sampling.subset import Subset


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

    def __call__(self, logits: mx.array, tokens: mx.array) -> mx.array:
        """Return the log-probabilities of one step, in the form that `read` expects.

        The result is one array, because the host waits for each array that it reads: [n, 1 + 2 *
        alternatives] uint32, for n rows with log-probabilities. The columns are the log-probability
        of the sampled token, the likeliest tokens, not sorted, and their log-probabilities.
        Log-probabilities are the bits of float32 numbers.
        """
        own = self._asking.of(logits).astype(mx.float32)
        values = own - mx.logsumexp(own, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(values, self._asking.of(tokens)[:, None], axis=-1)
        most = min(self._most, values.shape[-1])
        if not most:
            return mx.view(chosen, mx.uint32)
        top = mx.argpartition(-values, kth=most - 1, axis=-1)[:, :most]
        found = mx.concatenate([chosen, mx.take_along_axis(values, top, axis=-1)], axis=-1)
        bits = mx.view(found, mx.uint32)
        return mx.concatenate([bits[:, :1], top.astype(mx.uint32), bits[:, 1:]], axis=-1)

    def read(self, computed: mx.array, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """Return the log-probabilities by row, for the rows whose requests ask for them.

        computed: the result of a call.
        tokens: the sampled token of each row.
        """
        bits = np.array(computed)
        most = bits.shape[1] // 2
        values = bits.view(np.float32)
        chosen, top_values = values[:, 0].tolist(), values[:, 1 + most :].tolist()
        top_tokens = bits[:, 1 : 1 + most].tolist()
        rows = zip(self._asking.rows, chosen, top_tokens, top_values, strict=True)
        return {
            at: TokenLogprob(tokens[at], value, _ranked(top, values, self._counts[at] or 0))
            for at, value, top, values in rows
        }


def _ranked(
    tokens: Sequence[int], values: Sequence[float], count: int
) -> tuple[tuple[int, float], ...]:
    """Return the `count` most likely tokens, best first; equal ones by id."""
    pairs = sorted(zip(tokens, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(pairs[:count])
