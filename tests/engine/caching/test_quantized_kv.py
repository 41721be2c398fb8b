"""Quantised caches against a plain model of them, in batches of every history, and at load."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache

from backend.engine.caching import kv, quantized_kv
from backend.engine.caching.cache_form import use_cache_kind
from backend.engine.caching.cache_kind import CacheKind, cache_kind
from backend.engine.caching.quantized_kv import (
    Bits,
    Packing,
    QuantizedKV,
    QuantizedWindowKV,
    attend,
)
from backend.engine.device import has_fast_blas
from backend.engine.engine import Engine
from backend.engine.errors import InvalidRequest
from backend.engine.events import TextDelta
from backend.engine.load_request import LoadRequest
from backend.engine.loading.loader import load
from backend.engine.loading.row_masks import fit_row_masks
from backend.engine.planning.plan import CacheCost
from backend.engine.request import ChatPrompt, GenerationRequest
from backend.engine.settings import Settings
from tests.engine.kv_models import use_kind
from tests.engine.loading_models import write_model
from tests.engine.loads import at_once
from tests.engine.random_models import CONFIGS, VOCABULARY, random_model
from tests.engine.rounds import Rounds, alone, engine_model
from tests.engine.test_parity import check_schedule
from tests.long import TEST_LONG

pytestmark = pytest.mark.usefixtures("small_grammars")
EIGHT = CacheKind(8, 8, 32)
FOUR = CacheKind(4, 4, 32)
LAYERS = 2
MOST_ERROR = 0.01  # of the logits with 8 bits, as a share of their standard deviation


@cache
def model_of(kind: CacheKind, config: str = "full", name: str = "", **changes: Any) -> Any:
    """A random model with heads of 64 values whose caches are of the kind.

    name: distinguishes models that a test has made to attend in another way.
    """
    sizes = CONFIGS[config] | {"head_dim": 64} | changes
    module = importlib.import_module(f"mlx_lm.models.{sizes['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(sizes))
    keys = iter(mx.random.split(mx.random.key(7), 100))
    model.update(tree_map(lambda weight: _random(weight, next(keys)), model.parameters()))
    mx.eval(model.parameters())
    use_kind(model, kind)
    return model


def _random(weight: mx.array, key: mx.array) -> mx.array:
    if weight.ndim < 2:
        return 1 + 0.1 * mx.random.normal(weight.shape, key=key)
    return 0.2 * mx.random.normal(weight.shape, key=key)


def prefilled(model: Any, tokens: list[int], cut: int = 0) -> kv.RowCache:
    """A row with the KV of the tokens, computed in two steps at `cut` if given."""
    row = kv.new_row(model)
    for part in (tokens[:cut], tokens[cut:]):
        if part:
            model(mx.array([part]), cache=row)
            kv.evaluate(row)
    return row


def same(left: kv.RowCache, right: kv.RowCache) -> bool:
    """Whether two rows hold equal keys and values.

    The same sums in another order can differ in their last bit, and where that crosses the border
    between two steps of the quantisation, a value ends up one step away, and so do a few values
    computed from it. Another token would move all of them by many steps.
    """
    pairs = zip(left, right, strict=True)
    return all(
        mine.offset == other.offset and _alike(getattr(mine, name), getattr(other, name), mine)
        for mine, other in pairs
        for name in ("keys", "values")
    )


def _alike(mine: Any, other: Any, row: QuantizedKV) -> bool:
    values, bits = [], row.packing.bits
    assert bits.key == bits.value
    for packed in (mine, other):
        weights, scales, biases = (part[0, :, : row.offset] for part in packed)
        values.append(
            mx.dequantize(
                weights, scales, biases, group_size=row.group_size, bits=row.packing.bits.key
            )
        )
    step = mx.abs(other[1]).max()
    moved = mx.abs(values[0] - values[1])
    return bool(((moved > step / 100).mean() < 0.03).item() and (moved.max() < 2 * step).item())


@pytest.mark.parametrize(("kind", "schedules"), [(EIGHT, 8), (FOUR, 5), (CacheKind(5, 5, 32), 2)])
def test_every_row_gets_the_same_tokens_as_alone(kind: CacheKind, schedules: int) -> None:
    model = engine_model(model_of(kind))
    schedules = schedules if TEST_LONG else (schedules + 1) // 2
    seen: Counter[str] = Counter()
    # A value that rounding moves by a step of the quantisation moves logits by less than all values
    # together do. With kernels for AVX-512 that decides between two nearly equal tokens, seldom.
    rounding = MOST_ERROR * 2 ** (8 - kind.key_bits)
    for seed in range(schedules):
        seen += check_schedule(model, seed, rounding=rounding)
    assert seen["answers that rounding has changed"] <= schedules // 2
    assert seen["tokens compared"] > 20 * schedules
    assert seen["rows served from the prefix cache"] > schedules
    assert seen["rows preempted"] > 0


def test_eight_bits_are_close_to_none_and_four_less_so() -> None:
    """Each bit halves the error: over the same range, a step of 4 bits is 17 times one of 8."""
    tokens = mx.array([[token * 7 % VOCABULARY for token in range(1, 80)]])
    exact = model_of(CacheKind())(tokens)
    errors = []
    for kind in (EIGHT, FOUR):
        model = model_of(kind)
        difference = model(tokens, cache=kv.new_row(model)) - exact
        errors.append(difference.square().mean().sqrt().item() / exact.std().item())
    assert 0 < errors[0] < MOST_ERROR
    assert 8 < errors[1] / errors[0] < 34


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_a_row_costs_the_bytes_of_its_packed_values(bits: int, group: int) -> None:
    """64 values of a head take 64 x bits / 8 bytes, and a float32 scale and bias per group."""
    model = model_of(CacheKind(bits, bits, group))
    per_head = 64 * bits // 8 + 64 // group * 8
    per_token = LAYERS * 2 * 2 * per_head
    cost = kv.cost(model)
    assert cost == CacheCost(per_token, 0, largest=2 * 64 * bits // 8)
    plain = kv.cost(model_of(CacheKind()))
    assert plain.per_token == LAYERS * 2 * 2 * 64 * 4 > cost.per_token
    row = prefilled(model, list(range(1, 40)))
    assert kv.nbytes(row) == cost.of(39)
    assert kv.nbytes(kv.BatchCache([row]).extract(0)) == 39 * per_token
    assert kv.BatchCache([row, row]).nbytes == 2 * cost.of(39)


def test_a_trimmed_prefix_equals_recomputation() -> None:
    model = model_of(EIGHT)
    tokens = list(range(1, 60))
    batch = kv.BatchCache([prefilled(model, tokens[:30]), prefilled(model, tokens[10:25])])
    for token in tokens[30:]:
        model(mx.array([[token], [5]]), cache=batch.layers)
    stored = batch.extract(0)
    kv.evaluate(stored)
    assert kv.can_trim(stored)
    assert kv.always_trims(stored)
    copy = kv.clone(stored)
    assert kv.trim(copy, 19)
    assert kv.nbytes(copy) == 40 * kv.cost(model).per_token
    model(mx.array([[70, 71]]), cache=copy)
    assert same(copy, prefilled(model, [*tokens[:40], 70, 71]))
    assert same(stored, prefilled(model, tokens)), "the copy changed the original"


@pytest.mark.parametrize("cut", [0, 1, 17])
def test_how_a_prompt_is_divided_does_not_matter(cut: int) -> None:
    model = model_of(EIGHT)
    tokens = list(range(1, 40))
    assert same(prefilled(model, tokens, cut), prefilled(model, tokens))


def test_tokens_fed_at_once_see_what_they_see_one_by_one() -> None:
    """A step that verifies drafts feeds each row of a batch several tokens, as here."""
    model = model_of(EIGHT)
    rows = [list(range(1, 30)), list(range(40, 52))]
    together = kv.BatchCache([prefilled(model, row) for row in rows])
    fed = [[60, 61, 62, 63], [70, 71, 72, 73]]
    logits = model(mx.array(fed), cache=together.layers)
    for at, row in enumerate(rows):
        single = prefilled(model, row)
        steps = [model(mx.array([[token]]), cache=single) for token in fed[at]]
        assert mx.allclose(logits[at], mx.concatenate(steps, axis=1)[0], atol=0.02)
        assert same(together.extract(at), single)


def test_an_empty_row_joins_and_leaves_like_others() -> None:
    model = model_of(EIGHT)
    batch = kv.BatchCache([kv.new_row(model), kv.new_row(model), prefilled(model, [1, 2, 3])])
    model(mx.array([[4], [5], [6]]), cache=batch.layers)
    assert same(batch.extract(1), prefilled(model, [5]))
    batch.leave([0, 2])
    assert same(batch.layers, prefilled(model, [5]))


def test_a_model_with_a_recurrent_state_only_is_refused() -> None:
    model = random_model("recurrent")
    with pytest.raises(InvalidRequest, match="recurrent state"):
        use_cache_kind(model, EIGHT)
    assert kv.cost(model).fixed, "the model lost its own caches"


PAIRS = [(8, 4), (8, 0), (0, 4), (4, 8)]
# Differences of log-probabilities if a few values end up one step of 4 bits away; see `same`.
_ONE_STEP = 0.05


@pytest.mark.parametrize("bits", PAIRS)
@pytest.mark.parametrize("config", ["full", "window", "hybrid"])
def test_pairs_give_every_row_the_same_tokens_as_alone(config: str, bits: tuple[int, int]) -> None:
    model = model_of(CacheKind(*bits, 32), config, **(HYBRID if config == "hybrid" else {}))
    served = engine_model(model)
    seen: Counter[str] = Counter()
    for seed in range(6 if TEST_LONG else 2):
        seen += check_schedule(served, seed, closeness=_ONE_STEP)
    assert seen["rows served from the prefix cache"] > 0


@pytest.mark.parametrize("bits", [*PAIRS, (8, 8)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("mask", [None, "causal", "bools", "numbers", "by head"])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_attention_equals_that_over_the_dequantised(
    bits: tuple[int, int],
    heads: int,
    kv_heads: int,
    mask: str | None,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = max(10, tokens)
    queries = mx.random.normal((2, heads, tokens, 64), key=mx.random.key(1))
    parts = [
        mx.random.normal((2, kv_heads, columns, 64), key=mx.random.key(2)),
        mx.random.normal((2, kv_heads, columns, 32), key=mx.random.key(3)),
    ]
    packing = Packing(Bits(*bits), 32, dense=True)
    packed = [packing.packed(part, own) for part, own in zip(parts, bits, strict=True)]
    given: list[Any] = [part if len(part) > 1 else part[0] for part in packed]
    dense = [packing.unpacked(part, own) for part, own in zip(given, bits, strict=True)]
    visible = mx.random.uniform(shape=(2, 1, tokens, columns), key=mx.random.key(4)) < 0.7
    visible[..., 0] = True
    hiding: Any = {
        "bools": visible,
        "numbers": mx.where(visible, 0.0, -1e9),
        "by head": mx.broadcast_to(visible, (2, heads, tokens, columns)),
    }.get(mask or "", mask)
    expected = mx.fast.scaled_dot_product_attention(queries, *dense, scale=0.125, mask=hiding)
    # Of these columns, or of buffers with further columns, which it must not see.
    for views, more in ((False, 0), (True, 0), (False, 6)):
        monkeypatch.setattr(quantized_kv, "reads_views", lambda views=views: views)
        keys, values = tree_map(lambda part, more=more: _with_columns(part, more), given)
        seen = (*bits, columns) if more else bits
        found = attend(queries, keys, values, scale=0.125, mask=hiding, group_size=32, bits=seen)
        assert mx.allclose(found, expected, atol=1e-4)


@pytest.mark.skipif(
    mx.default_device() == mx.gpu or not has_fast_blas(), reason="for a CPU with a fast BLAS"
)
@pytest.mark.parametrize("transpose", [True, False])
def test_many_rows_are_multiplied_by_dequantised_values_on_a_cpu(transpose: bool) -> None:
    """MLX's product of packed values adds in another order, so the last bits would differ."""
    part = mx.random.normal((1, 2, 64, 64), key=mx.random.key(1))
    packed = mx.quantize(part, group_size=64, bits=8)
    dense = mx.dequantize(*packed, group_size=64, bits=8)
    left = mx.random.normal((1, 2, 1, 16, 64), key=mx.random.key(2))
    found = quantized_kv._product(left, packed, 64, 8, transpose=transpose)
    expected = left[:, :, 0] @ (dense.swapaxes(-1, -2) if transpose else dense)
    assert mx.array_equal(found[:, :, 0], expected)


def _with_columns(part: mx.array, more: int) -> mx.array:
    return mx.pad(
        part, [(0, 0), (0, 0), (0, more), (0, 0)], constant_values=mx.array(1, part.dtype)
    )


def test_a_pair_costs_the_bytes_of_its_parts() -> None:
    """Four layers, of which two have a window of 24 tokens."""
    model = model_of(CacheKind(8, 4, 32), "window")
    per_token = 2 * (64 + 16 + 32 + 16)  # heads, bytes of 8-bit keys and of 4-bit values
    cost = kv.cost(model)
    row = prefilled(model, list(range(1, 40)))
    full = sum(type(layer) is QuantizedKV for layer in row)
    windows = sum(type(layer) is QuantizedWindowKV for layer in row)
    assert min(full, windows) > 0
    assert cost == CacheCost(full * per_token, 0, ((per_token, 24),) * windows, largest=2 * 64)
    assert kv.nbytes(kv.BatchCache([row]).extract(0)) == per_token * (39 * full + 24 * windows)


HYBRID = {"hidden_size": 128, "block_dim": 128, "num_attention_heads": 2}


def test_only_the_attention_of_a_hybrid_is_quantised() -> None:
    model = model_of(EIGHT, "hybrid", **HYBRID)
    assert [type(layer) for layer in kv.new_row(model)] == [ArraysCache, QuantizedKV]
    plain = kv.cost(model_of(CacheKind(), "hybrid", **HYBRID))
    cost = kv.cost(model)
    assert cost.fixed == plain.fixed
    assert 0 < cost.per_token < plain.per_token / 2


def test_rows_of_a_quantised_hybrid_get_the_same_tokens_as_alone() -> None:
    model = engine_model(model_of(EIGHT, "hybrid", **HYBRID))
    seen: Counter[str] = Counter()
    for seed in range(20 if TEST_LONG else 6):
        seen += check_schedule(model, seed)
    assert seen["rows served from the prefix cache"] > 0


def test_a_hybrid_starts_from_its_stored_kv() -> None:
    rounds = Rounds(engine_model(model_of(EIGHT, "hybrid", **HYBRID)))
    prompt = list(range(1, 70))
    rounds.submit(1, prompt, 8, ignore_eos=True)
    rounds.drain()
    first = rounds.received[1].tokens
    following = [*prompt, *first, 5, 6, 7]
    rounds.submit(2, following, 8, ignore_eos=True)
    rounds.drain()
    finished = rounds.received[2].finished
    assert finished is not None
    assert finished.usage.cached_tokens >= len(prompt)
    assert rounds.received[2].tokens == alone(rounds.model, following, 8, ignore_eos=True).tokens


@pytest.mark.parametrize("way", ["cap", "sinks"])
def test_attention_of_another_kind_gets_dequantised_keys_and_values(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gemma2 caps its attention's logits, in code of its own."""
    changes = {"model_type": "gemma2", "query_pre_attn_scalar": 8} if way == "cap" else {}
    if way == "sinks":
        from mlx_lm.models import base, qwen3

        sinks = mx.zeros((4,))
        monkeypatch.setattr(
            qwen3,
            "scaled_dot_product_attention",
            lambda *args, **rest: base.scaled_dot_product_attention(*args, **rest, sinks=sinks),
        )
    plain = kv.cost(model_of(CacheKind(), **changes))
    model = model_of(CacheKind(8, 4, 32), name=way, **changes)
    fit_row_masks(model)
    row = prefilled(model, list(range(1, 40)))
    assert all(layer.packing.dense and not hasattr(layer, "bits") for layer in row)
    stored = kv.nbytes(kv.BatchCache([row]).extract(0)) // 39
    assert stored < plain.per_token / 2
    assert LAYERS == 2
    assert kv.cost(model).per_token == stored + plain.per_token, "a pass needs two layers"
    served = engine_model(model)
    for seed in range(2):
        check_schedule(served, seed, closeness=_ONE_STEP)


@pytest.mark.parametrize("fault", [RuntimeError, ValueError])
def test_what_a_device_cannot_compute_is_refused_with_its_reason(
    fault: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise fault("[quantized_matmul] No implementation for this shape.\nmore")

    monkeypatch.setattr(mx, "quantized_matmul", refuse)
    monkeypatch.setattr(mx, "dequantize", refuse)
    model = model_of(CacheKind(), head_dim=64)
    with pytest.raises(InvalidRequest, match=r"this device \(\[quantized_matmul\] No .* shape.\);"):
        use_cache_kind(model, EIGHT)
    assert not hasattr(model, "make_cache")


def test_a_device_that_computes_other_heads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faulty kernel here uses the first head's keys and values for all heads."""
    product: Any = mx.quantized_matmul

    def first_head(x: mx.array, *packed: mx.array, **how: Any) -> Any:
        if packed[0].ndim > 2:
            packed = tuple(mx.broadcast_to(part[:, :1], part.shape) for part in packed)
        return product(x, *packed, **how)

    unpack: Any = mx.dequantize

    def first_unpacked(*packed: mx.array, **how: Any) -> Any:
        return unpack(*(mx.broadcast_to(part[:, :1], part.shape) for part in packed), **how)

    monkeypatch.setattr(mx, "quantized_matmul", first_head)
    monkeypatch.setattr(mx, "dequantize", first_unpacked)
    model = model_of(CacheKind(), head_dim=64)
    with pytest.raises(InvalidRequest, match="MLX computes its attention wrongly"):
        use_cache_kind(model, EIGHT)
    assert not hasattr(model, "make_cache")


@pytest.mark.parametrize(
    ("size", "wish", "chosen"), [(128, 0, 64), (64, 0, 64), (96, 0, 32), (32, 0, 32), (128, 32, 32)]
)
def test_the_group_size_divides_the_head_size(size: int, wish: int, chosen: int) -> None:
    model = model_of(CacheKind(), head_dim=size)
    try:
        assert use_cache_kind(model, CacheKind(8, 8, wish)) == CacheKind(8, 8, chosen)
        assert {layer.group_size for layer in kv.new_row(model)} == {chosen}
    finally:
        del model.make_cache


@pytest.mark.parametrize(("size", "wish", "why"), [(8, 0, "8 values"), (96, 64, "64 does not")])
def test_heads_that_do_not_divide_are_refused(size: int, wish: int, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        use_cache_kind(model_of(CacheKind(), head_dim=size), CacheKind(8, 8, wish))


def test_a_cache_dtype_must_be_that_of_the_model() -> None:
    model = model_of(CacheKind())
    assert use_cache_kind(model, CacheKind(dtype="float32")) == CacheKind(dtype="float32")
    with pytest.raises(InvalidRequest, match=r"cannot be bfloat16: .* float32"):
        use_cache_kind(model, CacheKind(dtype="bfloat16"))


@pytest.mark.parametrize(
    ("key", "value", "options", "kind"),
    [
        ("", "", {}, CacheKind()),
        ("F16", "", {}, CacheKind()),
        ("f32", "", {}, CacheKind(dtype="float32")),
        ("f16", "bf16", {}, CacheKind(dtype="bfloat16")),
        ("q8_0", "Q8_0", {}, CacheKind(8, 8, 32)),
        ("q4_0", "q4_1", {}, CacheKind(4, 4, 32)),
        ("q5_1", "q5_1", {"kv_group_size": 64}, CacheKind(5, 5, 64)),
        ("", "", {"kv_bits": 6}, CacheKind(6, 6)),
        ("", "", {"kv_bits": 8, "kv_group_size": 128}, CacheKind(8, 8, 128)),
        ("q8_0", "q8_0", {"kv_bits": 8}, CacheKind(8, 8, 32)),
        ("q8_0", "q4_0", {}, CacheKind(8, 4, 32)),
        ("q8_0", "", {}, CacheKind(8, 0, 32)),
        ("bf16", "q5_1", {"kv_group_size": 64}, CacheKind(0, 5, 64, "bfloat16")),
    ],
)
def test_names_and_options_select_a_kind(
    key: str, value: str, options: dict[str, Any], kind: CacheKind
) -> None:
    assert cache_kind(Settings(**options), key, value) == kind


@pytest.mark.parametrize(
    ("key", "value", "options", "why"),
    [
        ("q8", "q8", {}, "CacheTypeKey is 'q8'"),
        ("", "iq4_nl", {}, "CacheTypeValue is 'iq4_nl'"),
        ("f32", "bf16", {}, "has one type"),
        ("q8_0", "q4_0", {"kv_bits": 8}, "kv_bits is 8, but"),
        ("f16", "f16", {"kv_bits": 8}, "kv_bits is 8, but"),
        ("q4_0", "q4_0", {"kv_bits": 8}, "kv_bits is 8, but"),
        ("", "", {"kv_bits": 7}, "kv_bits is 7"),
        ("", "", {"kv_bits": 8, "kv_group_size": 48}, "kv_group_size is 48"),
        ("", "", {"kv_group_size": 32}, "not quantised"),
    ],
)
def test_unsupported_quantisations_are_refused(
    key: str, value: str, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        cache_kind(Settings(**options), key, value)


async def _answers(engine: Engine, questions: list[str]) -> list[str]:
    async def answer(question: str) -> str:
        prompt = ChatPrompt(({"role": "user", "content": question},))
        async with engine.submit(GenerationRequest(question, prompt, max_tokens=60)) as generation:
            events = [event async for event in generation]
        return "".join(event.text for event in events if isinstance(event, TextDelta))

    return list(await asyncio.gather(*map(answer, questions)))


async def test_a_trained_model_answers_the_same_with_every_cache(tmp_path: Path) -> None:
    """Through the real engine; a load that fails leaves model and cache unchanged."""
    model = str(Path(__file__).parents[2] / "models" / "tiny_text")
    small = write_model(tmp_path / "small", **CONFIGS["window"])
    questions = ["Hello!", "Count to 12.", "What is 3 + 4?", "Count to 30."]
    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest("plain", model))
        expected = await _answers(engine, questions)
        assert expected[1] == "1 2 3 4 5 6 7 8 9 10 11 12"
        await engine.load(LoadRequest("m", model, cache_type_key="q8_0", cache_type_value="q8_0"))
        assert await _answers(engine, questions) == expected
        pair: dict[str, Any] = {"cache_type_key": "q8_0", "cache_type_value": "q4_0"}
        await engine.load(LoadRequest("m", model, **pair))
        quantised = await _answers(engine, questions)
        assert quantised[:2] == expected[:2]
        draft = str(Path(model).with_name("tiny_draft"))
        await engine.load(LoadRequest("m", model, **pair, draft_model=draft))
        assert await _answers(engine, questions) == quantised
        with pytest.raises(InvalidRequest, match="8 values"):
            await engine.load(LoadRequest("small", str(small), settings={"kv_bits": 8}))
        with pytest.raises(InvalidRequest, match="iq4_nl"):
            await engine.load(LoadRequest("n", model, cache_type_key="iq4_nl"))
        assert engine.require_model().name == "m"
        assert await _answers(engine, questions[:1]) == expected[:1]
    finally:
        await engine.stop(10)


def test_a_load_prepares_the_requested_cache() -> None:
    model = str(Path(__file__).parents[2] / "models" / "tiny_text")
    costs = {}
    for names in ("", ""), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"):
        request = LoadRequest("m", model, cache_type_key=names[0], cache_type_value=names[1])
        engine, _, _ = at_once(load(request, 1, threading.Event()))
        assert engine is not None
        costs[names] = engine.cost.per_token
        assert engine.slots == 32
    # 4 layers, 2 heads, keys and values of 32 numbers: float32, or packed with scale and bias
    assert list(costs.values()) == [16 * 128, 16 * (32 + 8), 16 * (16 + 8), 16 * (24 + 8)]
