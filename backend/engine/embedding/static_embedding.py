"""Static embeddings (model2vec): each token has a fixed vector, and a text the mean of these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding

from backend.engine.embedding.encoder import Outputs

_MOST_TOKENS = 1 << 17  # of a text; nothing in the model limits its length


class Model(Module):
    """A table of vectors.

    shape: the number of token ids, and the length of a vector.
    """

    model_type = "model2vec"

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vectors = Embedding(*shape)

    def __call__(self, ids: mx.array, **_: mx.array) -> Outputs:
        """Return the vectors of tokens, (rows, longest, dim)."""
        return Outputs(self.vectors(ids), None)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return one vector for each token id.

        A model2vec whose vocabulary was quantised stores fewer vectors, with the index of the
        vector of each token, and may store a factor for each token.
        """
        vectors = _stored(weights)
        if (index := weights.get("mapping")) is not None:
            vectors = vectors[index.astype(mx.int32)]
        if (factors := weights.get("weights")) is not None:
            vectors = vectors * factors.astype(mx.float32)[:, None]
        return {"vectors.weight": vectors}


def fields_of(path: Path) -> dict[str, Any]:
    """Return the fields of config.json that other modules read.

    path: the folder of the checkpoint.
    """
    weights: Any = mx.load(str(path / "model.safetensors"))
    vectors = _stored(weights)
    return {
        "vocab_size": weights.get("mapping", vectors).shape[0],
        "hidden_size": vectors.shape[1],
        "max_position_embeddings": _MOST_TOKENS,
        "num_attention_heads": 0,
    }


def _stored(weights: dict[str, mx.array]) -> mx.array:
    return weights["embedding.weight" if "embedding.weight" in weights else "embeddings"]
