"""Passes that check guesses compute Qwen3.5's linear attention as decode steps do.

The whole model is compared only roughly: matrix products of other heights are rounded differently.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from backend.engine.caching import kv
from tests.architectures.vlm_shapes import tiny_vlm_model
from tests.engine.kv_models import words


@pytest.mark.parametrize("width", [2, 5, 8])
def test_a_short_pass_recurs_like_single_steps(width: int) -> None:
    tiny_vlm_model("qwen3_5_text")  # patches mlx-vlm
    from mlx_vlm.models.qwen3_5.gated_delta import gated_delta_chunked

    key = mx.random.key(width)
    heads, depth = 2, 16
    q, k, v, gates = (
        mx.random.normal((1, width, heads, depth), key=each) for each in mx.random.split(key, 4)
    )
    decay, beta = mx.sigmoid(gates[..., 0]), mx.sigmoid(gates[..., 1])
    stepped = start = mx.zeros((1, heads, depth, depth))
    outputs = []
    for at in range(width):
        token = (array[:, at : at + 1] for array in (q, k, v, decay, beta))
        output, stepped = gated_delta_chunked(*token, stepped)
        outputs.append(output)
    passed, state = gated_delta_chunked(q, k, v, decay, beta, start)
    assert mx.array_equal(passed, mx.concatenate(outputs, axis=1))
    assert mx.array_equal(state, stepped)


@pytest.mark.parametrize("width", [2, 5, 8])
def test_a_short_pass_of_qwen3_5_computes_what_single_steps_compute(width: int) -> None:
    model = tiny_vlm_model("qwen3_5_text")
    prompt, checked = words(60, 1), words(width, 5)
    stepped, at_once = kv.new_row(model), kv.new_row(model)
    for row in (stepped, at_once):
        mx.eval(model(mx.array([prompt]), cache=row))
    steps = [model(mx.array([[token]]), cache=stepped) for token in checked]
    passed = model(mx.array([checked]), cache=at_once)
    assert mx.allclose(passed, mx.concatenate(steps, axis=1), rtol=0, atol=1e-4)
