"""Log-probabilities of a prompt's tokens, computed chunk by chunk during prefill.

The logits of a whole prompt would take gigabytes. So the size of a chunk's logits is limited, and
for each position only the log-probabilities of the next token and of the likeliest tokens remain.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from backend.engine.events import TokenLogprob
from backend.engine.sampling.logprobs import BatchLogprobs

_MOST_LOGITS = 1 << 24  # 64 MiB of float32


def longest_chunk(vocabulary: int) -> int:
    """Return the maximum number of tokens whose logits are computed at once."""
    return max(_MOST_LOGITS // vocabulary, 1)


def read(logits: mx.array, following: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """Return the log-probability of the next token at each position of a chunk.

    logits: [positions, vocabulary].
    following: the next token at each position.
    alternatives: how many of the likeliest tokens to return at each position.
    """
    logprobs = BatchLogprobs([alternatives] * len(following))
    computed = logprobs(logits, mx.array(list(following)))
    entries = logprobs.read(computed, following)
    return [entries[position] for position in range(len(following))]
