"""Log-probabilities of a prompt's own tokens, chunk by chunk as it is prefilled.

The logits of a whole prompt would take gigabytes, so a chunk is only as long as its logits may be
large, and of each place no more is kept than the token that follows and the likeliest ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from backend.engine.events import TokenLogprob
from backend.engine.logprobs import BatchLogprobs

_MOST_LOGITS = 1 << 24  # 64 MiB of float32


def longest_chunk(vocabulary: int) -> int:
    """Most tokens whose logits are computed at once."""
    return max(_MOST_LOGITS // vocabulary, 1)


def read(logits: mx.array, following: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """The log-probabilities of the tokens that follow the places of a chunk.

    logits: [places, vocabulary]. following: the token after each place.
    """
    logprobs = BatchLogprobs([alternatives] * len(following))
    computed = logprobs(logits, mx.array(list(following)))
    mx.eval(computed.arrays)
    entries = logprobs.read(computed, following)
    return [entries[place] for place in range(len(following))]
