"""Recurrent layers that compute long passes in chunks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import gated_delta, ssm

from backend.engine import device
from backend.engine.caching import kv
from backend.engine.loading.recurrent_layers import (
    _DELTA_CHUNK,
    _DELTA_LEAST,
    _SPACE_LEAST,
    GatedDelta,
    Pass,
    StateSpace,
    delta_step,
    use_chunks,
)
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


BY_TOKEN: Pass = _unpatched("mlx_lm.models.gated_delta").gated_delta_ops
STEP: Pass = _unpatched("mlx_lm.models.gated_delta")._gated_delta_step_ops
SCAN: Pass = _unpatched("mlx_lm.models.ssm").ssm_attn


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
    tokens=st.integers(_DELTA_LEAST, 5 * _DELTA_CHUNK),
    rows=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 3)]),
    alike=st.sampled_from([0.0, 1.0, 30.0]),
    without=st.sets(st.sampled_from(["state", "mask"])),
    decay=st.sampled_from([None, 0.0, 1e-30, 1.0]),
    strength=st.sampled_from([1.0, 2.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_chunks_of_gated_delta_layers_compute_what_single_tokens_compute(
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
    outputs, state = GatedDelta(BY_TOKEN)(**inputs)
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
    found, state = delta_step(q, k, v, g, beta, inputs["state"], mask)
    expected, last = STEP(q, k, v, g, beta, inputs["state"], mask)
    seen = slice(None, None, 2) if masked else slice(None)
    assert _close(found[seen], expected[seen])
    assert _close(state, last)
    half, state = delta_step(q.astype(mx.bfloat16), k, v, g, beta, inputs["state"], mask)
    assert (half.dtype, state.dtype) == (mx.bfloat16, mx.float32)


@pytest.mark.parametrize("cut", [_DELTA_LEAST, _DELTA_CHUNK - 1, _DELTA_CHUNK, 70, 110])
def test_a_prompt_may_be_cut_anywhere(cut: int) -> None:
    inputs = _inputs(120)
    state = inputs.pop("state")
    rule = GatedDelta(BY_TOKEN)
    whole, last = rule(**inputs, state=state)
    first, state = rule(**{name: value[:, :cut] for name, value in inputs.items()}, state=state)
    rest, state = rule(**{name: value[:, cut:] for name, value in inputs.items()}, state=state)
    assert _close(mx.concatenate([first, rest], axis=1), whole)
    assert _close(state, last)


def _scanned(tokens: int, lengths: list[int], *, groups: int = 1) -> dict[str, Any]:
    """What a state-space layer passes to the scan.

    lengths: tokens of each row.
    """
    rows, heads = len(lengths), 4
    keys = iter(mx.random.split(mx.random.key(tokens), 9))
    shape = rows, tokens, heads
    return {
        "x": mx.random.normal((*shape, 8), key=next(keys)),
        "A_log": mx.random.normal((heads,), key=next(keys)),
        "B": mx.random.normal((rows, tokens, groups, 16), key=next(keys)),
        "C": mx.random.normal((rows, tokens, groups, 16), key=next(keys)),
        "D": mx.random.normal((heads,), key=next(keys)),
        "dt": mx.random.normal(shape, key=next(keys)) * 2 - 3,
        "dt_bias": mx.random.normal((heads,), key=next(keys)),
        "state": mx.random.normal((rows, heads, 8, 16), key=next(keys)),
        "lengths": mx.array(lengths),
        "mask": mx.arange(tokens) < mx.array(lengths)[:, None],
    }


@given(
    tokens=st.integers(_SPACE_LEAST, 400),
    shorter=st.lists(st.integers(0, 30), min_size=0, max_size=2),
    groups=st.sampled_from([1, 2, 4]),
    without=st.sets(st.sampled_from(["state", "lengths"])),
)
@settings(max_examples=40, deadline=None)
def test_chunks_of_state_space_layers_compute_what_mlx_lm_computes(
    tokens: int, shorter: list[int], groups: int, without: set[str]
) -> None:
    inputs = _scanned(tokens, [tokens, *(tokens - less for less in shorter)], groups=groups)
    without |= {"lengths", "mask"} if "lengths" in without or not shorter else set()
    inputs = {name: value for name, value in inputs.items() if name not in without}
    found, state = StateSpace(SCAN)(**inputs)
    expected, last = SCAN(**inputs)
    assert found.dtype == expected.dtype
    seen = inputs.get("mask", mx.array(True))[..., None, None]
    assert _close(mx.where(seen, found, 0), mx.where(seen, expected, 0))
    assert _close(state, last)


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("tokens", [5, 100])
def test_a_state_space_layer_that_has_only_the_mask_skips_padding(
    tokens: int, *, chunked: bool
) -> None:
    """Otherwise rows of Nemotron-H share no prefill, and have no draft tokens in a batch."""
    inputs = _scanned(tokens, [tokens, 3])
    expected, last = SCAN(**inputs)
    del inputs["lengths"]
    found, state = StateSpace(SCAN, chunked=chunked)(**inputs)
    seen = inputs["mask"][..., None, None]
    assert _close(mx.where(seen, found, 0), mx.where(seen, expected, 0))
    assert _close(state, last)


def test_other_calls_of_the_scan_are_left_to_mlx_lm() -> None:
    left: list[dict[str, Any]] = []

    def scan(*_: Any, **named: Any) -> Any:
        left.append(named)

    layer, inputs = StateSpace(scan), _scanned(100, [100, 70])
    layer(**_scanned(_SPACE_LEAST - 1, [5]))
    layer(**inputs, step=64)
    layer(**inputs | {"mask": None})
    assert [named.get("step") for named in left] == [None, 64, None]
    assert all(named["lengths"] is not None for named in left)
    layer(**inputs)
    assert len(left) == 3


def test_numbers_that_are_not_finite_are_not_hidden() -> None:
    inputs = _inputs(100)
    del inputs["mask"]
    inputs["v"][0, 50] = mx.nan
    outputs, state = GatedDelta(BY_TOKEN)(**inputs)
    assert mx.isnan(state).any()
    assert mx.isnan(outputs[0, 50:]).all()


def test_short_passes_and_a_decay_for_each_key_are_left_to_mlx_lm() -> None:
    left: list[int] = []

    def by_token(q: mx.array, *rest: Any, **named: Any) -> Any:
        left.append(q.shape[1])
        return BY_TOKEN(q, *rest, **named)

    rule = GatedDelta(by_token)
    rule(*_inputs(_DELTA_LEAST - 1).values())
    inputs = _inputs(_DELTA_LEAST)
    inputs["g"] = mx.broadcast_to(inputs["g"][..., None], (*inputs["g"].shape, 32))
    rule(**inputs)
    rule(*_inputs(_DELTA_LEAST).values())
    assert left == [_DELTA_LEAST - 1, _DELTA_LEAST]


def test_earlier_states_are_left_to_mlx_vlm() -> None:
    by_token = _unpatched("mlx_vlm.models.gated_delta").gated_delta_ops
    inputs = _inputs(40) | {"state_steps": 3}
    *found, earlier = GatedDelta(by_token)(**inputs)
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
    inputs, rule = _inputs(40), GatedDelta(BY_TOKEN)
    expected, _ = rule(*inputs.values())
    assert len(started) == 1
    found, _ = mx.compile(rule)(*inputs.values())
    assert _close(found, expected)


@pytest.mark.parametrize("kind", ["gated delta", "state space"])
def test_a_model_computes_the_same_in_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "gated_delta_ops", BY_TOKEN)
    monkeypatch.setattr(gated_delta, "_gated_delta_step_ops", STEP)
    monkeypatch.setattr(ssm, "ssm_attn", SCAN)
    model = kv_model(kind)
    prompt = mx.array([words(100, 1)])
    expected = model(prompt, cache=kv.new_row(model))
    on_cpu = device.detect().kind == "cpu"
    for _ in range(2):
        use_chunks()
        used: Any = gated_delta.gated_delta_ops
        assert isinstance(used, GatedDelta)
        assert used._by_token is BY_TOKEN
        assert gated_delta._gated_delta_step_ops is (delta_step if on_cpu else STEP)
        assert isinstance(ssm.ssm_attn, StateSpace)
        assert ssm.ssm_attn._chunked is on_cpu
    assert _close(model(prompt, cache=kv.new_row(model)), expected)


async def test_a_load_lets_such_models_use_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_delta, "gated_delta_ops", BY_TOKEN)
    config = MODELS["gated delta"] | {"vocab_size": 259, "eos_token_id": 0}
    async with seeing(write_model(tmp_path / "qwen", **config)) as engine:
        assert isinstance(gated_delta.gated_delta_ops, GatedDelta)
        answer = await answer_to(engine, asking("What is your name? " * 20, max_tokens=3))
        assert answer.prompt_tokens > 2 * _DELTA_CHUNK


def test_nothing_is_imported_for_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlx_lm.models.gated_delta", "mlx_lm.models.ssm"):
        monkeypatch.delitem(sys.modules, name)
        use_chunks()
        assert name not in sys.modules
