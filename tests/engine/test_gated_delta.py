"""Gated delta layers that compute long passes in chunks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import gated_delta

from backend.engine import device
from backend.engine.caching import kv
from backend.engine.loading.gated_delta import _CHUNK, _LEAST, ChunkedRule, Rule, step, use_chunks
from tests.engine.kv_models import MODELS, kv_model, words
from tests.engine.loading_models import write_model
from tests.engine.vision.seeing import answer_to, asking, seeing


def _unpatched(name: str) -> Any:
    """Another copy of a library's module, because an earlier test may have loaded such a model."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BY_TOKEN: Rule = _unpatched("mlx_lm.models.gated_delta").gated_delta_ops
STEP: Rule = _unpatched("mlx_lm.models.gated_delta")._gated_delta_step_ops


def _inputs(
    tokens: int, *, rows: int = 1, heads: int = 2, group: int = 2, alike: float = 0.0, seed: int = 0
) -> dict[str, Any]:
    """What a layer passes to the rule.

    alike: the higher, the more alike are the keys of all tokens.
    """
    keys = mx.random.split(mx.random.key(seed), 7)
    q = mx.random.normal((rows, tokens, heads, 32), key=keys[0])
    k = mx.random.normal((rows, tokens, heads, 32), key=keys[1]) + alike
    q, k = gated_delta.normalize_qk(q, k, inv_scale=32**-0.5, eps=1e-6)
    shape = rows, tokens, heads * group
    return {
        "q": q,
        "k": k,
        "v": mx.random.normal((*shape, 16), key=keys[2]),
        "g": mx.exp(-mx.exp(mx.random.normal(shape, key=keys[3]) * 3 - 2)),
        "beta": mx.sigmoid(mx.random.normal(shape, key=keys[4]) * 2),
        "state": mx.random.normal((rows, heads * group, 16, 32), key=keys[5]),
        "mask": mx.random.uniform(shape=(rows, tokens), key=keys[6]) < 0.8,
    }


def _close(found: mx.array, expected: mx.array) -> bool:
    bound = 1e-5 * (1 + mx.abs(expected).max())
    return bool(mx.all(mx.abs(found - expected) < bound).item())


@given(
    tokens=st.integers(_LEAST, 5 * _CHUNK),
    rows=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 3)]),
    alike=st.sampled_from([0.0, 1.0, 30.0]),
    without=st.sets(st.sampled_from(["state", "mask"])),
    decay=st.sampled_from([None, 0.0, 1e-30, 1.0]),
    strength=st.sampled_from([1.0, 2.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_chunks_compute_what_single_tokens_compute(
    tokens: int,
    rows: int,
    heads: tuple[int, int],
    alike: float,
    without: set[str],
    decay: float | None,
    strength: float,
    seed: int,
) -> None:
    inputs = _inputs(tokens, rows=rows, heads=heads[0], group=heads[1], alike=alike, seed=seed)
    inputs["beta"] = inputs["beta"] * strength
    if decay is not None:
        inputs["g"][:, ::3] = decay
    inputs = {name: value for name, value in inputs.items() if name not in without}
    outputs, state = ChunkedRule(BY_TOKEN)(**inputs)
    expected, last = BY_TOKEN(**inputs)
    assert outputs.dtype == expected.dtype
    assert outputs.shape == expected.shape
    seen = inputs.get("mask", mx.ones((rows, tokens), dtype=mx.bool_))[..., None, None]
    assert _close(mx.where(seen, outputs, 0), mx.where(seen, expected, 0))
    assert _close(state, last)


@pytest.mark.parametrize("for_each_key", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_step_of_a_cpu_computes_what_the_libraries_compute(
    for_each_key: bool, masked: bool
) -> None:
    inputs = _inputs(1, rows=3, heads=4, group=1)
    q, k, v, g, beta = (inputs[name][:, 0] for name in ("q", "k", "v", "g", "beta"))
    if for_each_key:
        g = mx.random.uniform(shape=k.shape, key=mx.random.key(9))
    mask = mx.array([True, False, True]) if masked else None
    found, state = step(q, k, v, g, beta, inputs["state"], mask)
    expected, last = STEP(q, k, v, g, beta, inputs["state"], mask)
    seen = slice(None, None, 2) if masked else slice(None)
    assert _close(found[seen], expected[seen])
    assert _close(state, last)
    half, state = step(q.astype(mx.bfloat16), k, v, g, beta, inputs["state"], mask)
    assert (half.dtype, state.dtype) == (mx.bfloat16, mx.float32)


@pytest.mark.parametrize("cut", [_LEAST, _CHUNK - 1, _CHUNK, 70, 110])
def test_a_prompt_may_be_cut_anywhere(cut: int) -> None:
    inputs = _inputs(120)
    state = inputs.pop("state")
    rule = ChunkedRule(BY_TOKEN)
    whole, last = rule(**inputs, state=state)
    first, state = rule(**{name: value[:, :cut] for name, value in inputs.items()}, state=state)
    rest, state = rule(**{name: value[:, cut:] for name, value in inputs.items()}, state=state)
    assert _close(mx.concatenate([first, rest], axis=1), whole)
    assert _close(state, last)


def test_numbers_that_are_not_finite_are_not_hidden() -> None:
    inputs = _inputs(100)
    del inputs["mask"]
    inputs["v"][0, 50] = mx.nan
    outputs, state = ChunkedRule(BY_TOKEN)(**inputs)
    assert mx.isnan(state).any()
    assert mx.isnan(outputs[0, 50:]).all()


def test_short_passes_and_a_decay_for_each_key_are_left_to_mlx_lm() -> None:
    left: list[int] = []

    def by_token(q: mx.array, *rest: Any, **named: Any) -> Any:
        left.append(q.shape[1])
        return BY_TOKEN(q, *rest, **named)

    rule = ChunkedRule(by_token)
    rule(*_inputs(_LEAST - 1).values())
    inputs = _inputs(_LEAST)
    inputs["g"] = mx.broadcast_to(inputs["g"][..., None], (*inputs["g"].shape, 32))
    rule(**inputs)
    rule(*_inputs(_LEAST).values())
    assert left == [_LEAST - 1, _LEAST]


def test_earlier_states_are_left_to_mlx_vlm() -> None:
    by_token = _unpatched("mlx_vlm.models.gated_delta").gated_delta_ops
    inputs = _inputs(40) | {"state_steps": 3}
    *found, earlier = ChunkedRule(by_token)(**inputs)
    assert earlier.shape == (1, 3, *inputs["state"].shape[1:])
    assert len(found) == 2


def test_a_gpu_starts_each_layer_and_compiled_functions_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: False)
    started: list[Any] = []
    start: Any = mx.async_eval

    def starting(*arrays: Any) -> None:
        start(*arrays)
        started.append(arrays)

    monkeypatch.setattr(mx, "async_eval", starting)
    inputs, rule = _inputs(40), ChunkedRule(BY_TOKEN)
    expected, _ = rule(*inputs.values())
    assert len(started) == 1
    found, _ = mx.compile(rule)(*inputs.values())
    assert _close(found, expected)


def test_a_model_computes_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "gated_delta_ops", BY_TOKEN)
    monkeypatch.setattr(gated_delta, "_gated_delta_step_ops", STEP)
    model = kv_model("gated delta")
    prompt = mx.array([words(100, 1)])
    expected = model(prompt, cache=kv.new_row(model))
    for _ in range(2):
        use_chunks()
        assert gated_delta._gated_delta_step_ops is (
            step if device.detect().kind == "cpu" else STEP
        )
        assert isinstance(gated_delta.gated_delta_ops, ChunkedRule)
        assert gated_delta.gated_delta_ops._by_token is BY_TOKEN
    assert _close(model(prompt, cache=kv.new_row(model)), expected)


async def test_a_load_lets_such_models_use_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_delta, "gated_delta_ops", BY_TOKEN)
    config = MODELS["gated delta"] | {"vocab_size": 259, "eos_token_id": 0}
    async with seeing(write_model(tmp_path / "qwen", **config)) as engine:
        assert isinstance(gated_delta.gated_delta_ops, ChunkedRule)
        answer = await answer_to(engine, asking("What is your name? " * 20, max_tokens=3))
        assert answer.prompt_tokens > 2 * _CHUNK


def test_nothing_is_imported_for_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlx_lm.models.gated_delta")
    use_chunks()
    assert "mlx_lm.models.gated_delta" not in sys.modules
