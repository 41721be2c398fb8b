"""Passes that check guesses give the log-probabilities of decode steps."""

from __future__ import annotations

import mlx.core as mx
import pytest

from backend.engine.caching import kv
from tests.architectures.vlm_shapes import tiny_vlm_model
from tests.engine.kv_models import words


@pytest.mark.parametrize("width", [2, 5, 8])
def test_a_short_pass_of_qwen3_5_computes_what_single_steps_compute(width: int) -> None:
    model = tiny_vlm_model("qwen3_5_text")
    prompt, checked = words(60, 1), words(width, 5)
    stepped, at_once = kv.new_row(model), kv.new_row(model)
    for row in (stepped, at_once):
        mx.eval(model(mx.array([prompt]), cache=row))
    steps = [model(mx.array([[token]]), cache=stepped) for token in checked]
    passed = model(mx.array([checked]), cache=at_once)
    assert mx.allclose(passed, mx.concatenate(steps, axis=1), rtol=0, atol=3e-6)
