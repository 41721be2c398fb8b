"""Rotary embeddings with shared angles are those of `mx.fast.rope`, with fewer operations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine import device
from backend.engine.caching.shared_numbers import SharedNumbers, shared_numbers
from backend.engine.rotary_angles import SharedAngles
from tests.engine.random_models import random_model
from tests.long import examples

PLAIN = getattr(mx.fast.rope, "_rope", mx.fast.rope)  # MLX's own, also where it is replaced
CPU = device.Device("cpu", "test", 1 << 34, 1 << 34)
RULE: dict[str, Any] = {"traditional": False, "base": 1e4, "scale": 1.0}


@pytest.fixture(autouse=True, scope="module")
def cpu() -> Iterator[None]:
    with mx.stream(mx.cpu):
        yield


@st.composite
def _calls(draw: st.DrawFn) -> tuple[mx.array, int, dict[str, Any]]:
    rows, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    size = draw(st.sampled_from((8, 32, 80)))
    dims = draw(st.sampled_from((size, size // 2)))
    dtype = draw(st.sampled_from((mx.float32, mx.bfloat16, mx.float16)))
    places = draw(st.lists(st.integers(0, 200_000), min_size=rows, max_size=rows))
    key = mx.random.key(draw(st.integers(0, 1 << 30)))
    own = draw(st.booleans())
    named = {
        "traditional": draw(st.booleans()),
        "base": None if own else draw(st.sampled_from((1e4, 5e5))),
        "scale": draw(st.sampled_from((1.0, 0.25))),
        "offset": draw(
            st.sampled_from((places[0], shared_numbers.array(shared_numbers(tuple(places)))))
        ),
        "freqs": mx.random.uniform(1, 1000, (dims // 2,), key=key) if own else None,
    }
    return mx.random.normal((rows, 3, tokens, size), key=key).astype(dtype), dims, named


@settings(max_examples=examples(150), deadline=None)
@given(calls=st.lists(_calls(), min_size=1, max_size=6))
def test_every_bit_is_the_same(calls: list[tuple[mx.array, int, dict[str, Any]]]) -> None:
    shared = SharedAngles(PLAIN)
    for a, dims, named in calls * 2:
        expected, got = PLAIN(a, dims, **named), shared(a, dims, **named)
        assert got.dtype == expected.dtype
        assert mx.array_equal(got, expected)


def test_all_layers_use_the_same_angles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cosines(tokens: list[list[int]]) -> int:
        file = tmp_path / "graph.dot"
        mx.export_to_dot(str(file), model(mx.array(tokens)))
        return file.read_text().count('"Cos"')

    model = random_model("full")
    layers = len(model.layers)
    assert layers > 1
    monkeypatch.setattr(mx.fast, "rope", PLAIN)
    assert cosines([[5, 6]]) == 2 * layers
    monkeypatch.setattr(mx.fast, "rope", SharedAngles(PLAIN))
    assert cosines([[5, 6]]) == 1


def test_an_array_that_may_be_written_to_is_read_again() -> None:
    shared, a, offset = SharedAngles(PLAIN), mx.random.normal((2, 3, 1, 8)), mx.array([3, 4])
    for _ in range(3):
        got, expected = (rope(a, 8, offset=offset, **RULE) for rope in (shared, PLAIN))
        assert mx.array_equal(got, expected)
        offset += 1


def test_few_small_angles_are_kept() -> None:
    shared = SharedAngles(PLAIN)
    for tokens in (*range(1, 9), 10_000):
        mx.eval(shared(mx.ones((1, 1, tokens, 64)), 64, offset=7, **RULE))
    kept = [part for _, *parts in shared._kept.values() for part in parts]
    assert len(kept) == 8
    assert max(part.nbytes for part in kept) == 8 * 64 * 4
    shared.clear()
    assert not shared._kept


def test_only_a_cpu_without_compiled_functions_shares_angles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mx.fast, "rope", PLAIN)
    monkeypatch.setattr(mx, "disable_compile", lambda: None)
    device.prepare(device.Device("metal", "test", 1 << 34, 1 << 34), {})
    device.prepare(CPU, {device.COMPILE_ON_CPU: "1"})
    assert mx.fast.rope is PLAIN
    for _ in range(2):
        device.prepare(CPU, {})
        assert getattr(mx.fast.rope, "_rope", None) is PLAIN


def test_the_numbers_of_kept_arrays_are_known() -> None:
    numbers = SharedNumbers(2)
    first, second = numbers.array(numbers((1, 2))), numbers.array(numbers((3,)))
    assert numbers.array(numbers((1, 2))) is first
    assert numbers.numbers_of(first) == (1, 2)
    third = numbers.array(numbers.plus(numbers((3,)), 1))
    assert [numbers.numbers_of(one) for one in (first, second, third)] == [None, (3,), (4,)]
    assert third.tolist() == [4]
    assert numbers.numbers_of(mx.array([4])) is None
    numbers.clear()
    assert numbers.numbers_of(second) is None


def test_numbers_that_follow_from_an_array_are_not_copied_from_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = SharedNumbers(64)
    made = numbers((5, 9))
    numbers.array(made)

    def copied(_: object) -> mx.array:
        raise AssertionError("copied from the host")

    monkeypatch.setattr(mx, "array", copied)
    later = made
    for _ in range(3):
        later = numbers.plus(later, 2)
        assert numbers.plus(later, 2) is numbers.plus(later, 2)
        assert numbers.array(later).tolist() == list(later)
    assert later == (11, 15)
