"""Every family in the types that a GPU computes in: a short text beside a long one stays itself.

A CPU casts weights to float32 unless a type is set, and float32 hides masks that become infinite.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.embedding import encoder
from backend.engine.embedding.encoder_shape import Shape
from backend.engine.embedding.encoding import Piece
from tests.engine.embedding import jina_v4_checkpoint
from tests.engine.embedding import rotary_checkpoints as rotary
from tests.engine.embedding import tiny_checkpoints as tiny
from tests.engine.embedding.engine_calls import serving
from tests.engine.embedding.mlx_vlm_checkpoints import MLX_VLM_EMBEDDERS, write_mlx_vlm
from tests.long import TEST_LONG

_FAMILIES = (*tiny.FAMILIES, *rotary.FAMILIES, *MLX_VLM_EMBEDDERS, "jina_v4")
# Lengths of one bucket, so that they run together; far more padding than a window of 8 tokens.
_LENGTHS = (97, 120, 128)
_WITHIN = {"float16": 0.01, "bfloat16": 0.08}


def _write(family: str, folder: Path) -> Path:
    if family == "jina_v4":
        return jina_v4_checkpoint.write(folder)
    if family in MLX_VLM_EMBEDDERS:
        return write_mlx_vlm(family, folder)
    if family in rotary.FAMILIES:
        return rotary.write(family, folder)
    return tiny.write(family, folder)


def _cases() -> list[tuple[str, str]]:
    """Every family with both types, or by turns with one of them without TEST_LONG."""
    types = tuple(_WITHIN)
    if TEST_LONG:
        return [(family, dtype) for family in _FAMILIES for dtype in types]
    return [(family, types[at % len(types)]) for at, family in enumerate(_FAMILIES)]


@pytest.mark.parametrize(("family", "dtype"), _cases())
async def test_padding_does_not_change_a_row(family: str, dtype: str, tmp_path: Path) -> None:
    if family == "nomic_v2_moe" and mx.default_device() == mx.cpu:
        pytest.skip("MLX multiplies experts in float32 only on a CPU")
    folder = _write(family, tmp_path)
    settings = {"dtype": dtype} | ({"task": "code"} if family == "jina_v4" else {})
    rows = [[6 + (place * step) % 40 for place in range(step)] for step in _LENGTHS]
    pieces = [Piece(row, [0] * len(row)) for row in rows]
    asked = family in ("qwen3_rerank", "gemma_rerank")
    async with serving(folder, settings=settings, reranking=asked) as engine:
        together = (await engine.encode(lambda: pieces)).outputs
        for piece, found in zip(pieces, together, strict=True):
            (alone,) = (await engine.encode(lambda piece=piece: [piece])).outputs  # type: ignore[misc]
            assert np.isfinite(found).all()
            largest = np.abs(alone).max()
            np.testing.assert_allclose(found / largest, alone / largest, atol=_WITHIN[dtype])


def test_the_mean_of_a_long_row_is_finite() -> None:
    """The states of a row may add up to more than float16 can express."""
    shape = Shape(
        20, hidden=32, layers=1, heads=4, inner=48, longest=8192, pooled="mean", outputs=1
    )
    model = encoder.Model(shape)
    model.layers[-1].mlp_norm.weight = mx.full((32,), 30.0)
    model.set_dtype(mx.float16)
    short, long = (mx.full((1, length), 5) for length in (4, 2000))
    expected, found = (
        np.array(model(ids, mx.ones_like(ids), mx.zeros_like(ids)).logits) for ids in (short, long)
    )
    np.testing.assert_allclose(found, expected, atol=0.01)
