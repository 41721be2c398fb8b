"""What the event loop and the engine thread exchange for Embedding, Rerank and TokenClassify.

This module imports only the standard library, so the event loop needs neither NumPy nor MLX.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Piece:
    """One row for the model: token ids, and segment ids if the model distinguishes two segments.

    Without segment ids, all tokens are in the segment 0.
    """

    ids: list[int]
    segments: list[int] = field(default_factory=list)
    cut: int = 0  # number of tokens that were left out because the input is too long
    # Number of tokens at the beginning that are not pooled, because they are a prompt.
    unpooled: int = 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """The model's float32 output for each piece of a request, in the order of the pieces.

    An output is, depending on the model: a vector (dim,), token vectors (tokens, dim), a score (),
    or label probabilities (tokens, labels). For a recording, the output is its samples.
    """

    outputs: tuple[np.ndarray, ...]
