"""Attention by plain operations, on devices that prepare a kernel for each new shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine import device
from backend.engine.device import Device
from backend.engine.loading.pass_cost import pass_cost
from backend.engine.small_attention import SmallAttention
from tests.engine.kv_models import kv_model
from tests.engine.rounds import Rounds, engine_model

ATTEND: Any = mx.fast.scaled_dot_product_attention
CUDA = Device("cuda", "test", 1 << 34, 1 << 34)


@given(
    st.integers(1, 3),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.integers(2, 9),
    st.integers(0, 20),
    st.sampled_from(["none", "causal", "shared", "rows", "heads", "added"]),
    st.booleans(),
)
def test_it_computes_what_mlx_does(
    rows: int, heads: tuple[int, int], tokens: int, before: int, kind: str, sinks: bool
) -> None:
    keys = iter(mx.random.split(mx.random.key(7), 6))
    places = before + tokens
    q = mx.random.normal((rows, heads[0], tokens, 16), key=next(keys))
    k = mx.random.normal((rows, heads[1], places, 16), key=next(keys))
    v = mx.random.normal((rows, heads[1], places, 8), key=next(keys))
    shape = {"rows": (rows, 1), "heads": (rows, heads[0])}.get(kind, ())
    noise = mx.random.normal((*shape, tokens, places), key=next(keys))
    masks = {"none": None, "causal": "causal", "added": noise}
    named: dict[str, Any] = {
        "scale": 0.3,
        "mask": masks.get(kind, (noise > 0) | (mx.arange(places) == 0)),
        "sinks": mx.random.normal((heads[0],), key=next(keys)) if sinks else None,
    }
    got = SmallAttention(ATTEND)(q, k, v, **named)
    assert mx.allclose(got, ATTEND(q, k, v, **named), atol=1e-5)


def test_a_long_pass_a_single_token_and_other_arguments_use_mlxs_kernels() -> None:
    seen: list[int] = []

    def noting(q: mx.array, *rest: Any, **named: Any) -> mx.array:
        seen.append(q.shape[2])
        result: mx.array = ATTEND(q, *rest, **named)
        return result

    attend = SmallAttention(noting, 2 * 8 * 10)
    for tokens, places in ((8, 10), (9, 10), (8, 11), (1, 5)):
        q, k = mx.zeros((1, 2, tokens, 8)), mx.zeros((1, 2, places, 8))
        attend(q, k, k, scale=1.0)
    assert seen == [9, 8, 1]
    q = mx.zeros((1, 2, 3, 8))
    attend(q, q, q, scale=1.0, stream=mx.cpu)
    assert seen == [9, 8, 1, 3]


@pytest.mark.usefixtures("each_order")
def test_the_turns_of_a_chat_need_no_new_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new pair of lengths of queries and keys takes cuDNN 60 ms."""
    shapes: set[tuple[int, int]] = set()

    def noting(q: mx.array, k: mx.array, *rest: Any, **named: Any) -> mx.array:
        if q.shape[2] > 1:
            shapes.add((q.shape[2], k.shape[2]))
        result: mx.array = ATTEND(q, k, *rest, **named)
        return result

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noting)
    device.prepare(CUDA, {})
    rounds = Rounds(engine_model(kv_model("attention"), end_tokens=frozenset(), prefill_chunk=512))
    text: list[int] = []
    for turn in range(1, 9):
        text += [(turn * at * at + at) % 90 + 1 for at in range(20 + 3 * turn)]
        rounds.submit(turn, text, 10 + turn)
        rounds.drain()
        text += rounds.received[turn].tokens
    assert not rounds.faults
    assert len(shapes) <= 1


def test_only_cuda_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", ATTEND)
    device.prepare(Device("metal", "test", 1 << 34, 1 << 34), {})
    assert mx.fast.scaled_dot_product_attention is ATTEND
    for _ in range(2):
        device.prepare(CUDA, {})
        assert getattr(mx.fast.scaled_dot_product_attention, "attend", None) is ATTEND


def test_its_memory_is_charged_to_passes_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", SmallAttention(ATTEND))
    passes = pass_cost(kv_model("attention"), 96)
    plain = replace(passes, per_small=0)
    few, many = (passes.of(tokens, 4096) - plain.of(tokens, 4096) for tokens in (64, 4096))
    assert 64 * 4096 * 4 * 3 * 4 <= few < 2 * 64 * 4096 * 4 * 3 * 4
    assert many < 2 * (1 << 24) * 3 * 4
    assert passes.of(1, 4096) == plain.of(1, 4096)
