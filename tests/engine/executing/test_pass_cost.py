"""The estimated memory of a pass, compared with MLX's own peak."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest

from backend.engine.caching import kv
from backend.engine.executing.pass_cost import pass_cost
from tests.engine.kv_models import kv_model
from tests.engine.random_models import VOCABULARY
from tests.engine.rounds import MIB
from tests.engine.test_memory import WIDE


@pytest.mark.parametrize("kind", ["attention", "window", "state space", "latent", "quantised"])
@pytest.mark.parametrize(("tokens", "before"), [(64, 0), (256, 768), (32, 3000)])
def test_a_pass_takes_about_the_estimated_memory(kind: str, tokens: int, before: int) -> None:
    model = kv_model(kind, **WIDE.get(kind, {}))
    foreseen = pass_cost(model, VOCABULARY).of(tokens, before + tokens)
    peak = _peak(model, tokens, before)
    # cuBLAS allocates up to this much for a product, whatever its size.
    workspace = 32 * MIB if mx.cuda.is_available() else 0
    assert peak <= 1.5 * foreseen + workspace
    assert foreseen <= 12 * peak


def _peak(model: Any, tokens: int, before: int) -> int:
    """Bytes at the peak of a pass over `tokens` behind `before`, without the KV that it adds."""
    row = kv.new_row(model)
    for start in range(0, before, 256):
        model(mx.zeros((1, min(256, before - start)), mx.int32), cache=row)
        kv.evaluate(row)
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    model(mx.zeros((1, tokens), mx.int32), cache=row)
    kv.evaluate(row)
    mx.synchronize()
    return mx.get_peak_memory() - max(mx.get_active_memory(), held)
