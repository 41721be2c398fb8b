"""The estimated memory of a pass, compared with MLX's own peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from backend.engine import device
from backend.engine.caching import kv
from backend.engine.loading.pass_cost import _MANY, FirstPass, pass_cost
from backend.engine.loading.recurrent_layers import use_chunks
from backend.engine.planning.charges import Charges
from backend.engine.planning.plan import Arrived, CacheCost, Limits, PassCost
from backend.engine.planning.prefix_index import PrefixKey
from backend.engine.planning.sequence_state import SequenceState
from backend.engine.request import Sampling
from backend.engine.sampling.filters import search_all
from backend.engine.sampling.logprobs import BatchLogprobs
from backend.engine.sampling.penalties import Past
from backend.engine.sampling.sampler import BatchSampler
from tests.engine.kv_models import kv_model
from tests.engine.random_models import VOCABULARY
from tests.engine.rounds import MIB
from tests.engine.steady_cost import peak_bytes, steady_cost
from tests.engine.test_memory import WIDE


@cache
def _measured_model(kind: str) -> tuple[Any, PassCost]:
    model = kv_model(kind, **WIDE.get(kind, {}))
    return model, pass_cost(model, VOCABULARY)


@cache
def _bound(kind: str) -> PassCost:
    return steady_cost(_measured_model(kind)[0], VOCABULARY, bounded=True)


@pytest.mark.parametrize("kind", ["attention", "window", "state space", "latent", "quantised"])
@pytest.mark.parametrize(("tokens", "before"), [(64, 0), (256, 768), (32, 3000)])
def test_a_pass_takes_about_the_estimated_memory(kind: str, tokens: int, before: int) -> None:
    model, passes = _measured_model(kind)
    foreseen = passes.of(tokens, before + tokens)
    peak = _peak(model, tokens, before)
    # cuBLAS allocates up to this much for a product, whatever its size.
    workspace = 32 * MIB if mx.cuda.is_available() else 0
    assert peak <= 1.5 * foreseen + workspace
    assert foreseen <= 12 * peak


@pytest.mark.parametrize("kind", ["attention", "window"])
@pytest.mark.parametrize(("tokens", "before"), [(64, 0), (256, 768), (32, 3000)])
def test_a_pass_takes_no_more_than_the_bound(kind: str, tokens: int, before: int) -> None:
    model, measured = _measured_model(kind)
    assert FirstPass(model).ordinary
    bound = replace(_bound(kind))
    assert _peak(model, tokens, before) <= bound.of(tokens, before + tokens)
    assert measured.per_pair <= bound.per_pair
    bound.become(measured)
    assert bound == measured


# A large recurrent state, with which few tokens say little about many; and keys and values that a
# pass of several tokens computes from all stored vectors.
OTHER_LAYERS: dict[str, dict[str, Any]] = {
    "gated delta": {
        "num_hidden_layers": 4,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "state space": WIDE["state space"],
    "latent": {"num_attention_heads": 8, "num_key_value_heads": 8, "qk_nope_head_dim": 64},
}


@pytest.mark.parametrize("kind", OTHER_LAYERS)
def test_passes_of_one_few_and_many_tokens_are_charged_what_they_take(kind: str) -> None:
    """One figure for all would charge long passes for the state that short passes copy."""
    model = kv_model(kind, **OTHER_LAYERS[kind])
    use_chunks()
    passes = steady_cost(model, VOCABULARY)
    for tokens, before in ((1, 256), (8, 256), (32, 256), (256, 256), (256, 1792)):
        peak = max(_peak(model, tokens, before) for _ in range(3))
        assert peak <= passes.of(tokens, before + tokens), (tokens, before)
        if tokens > _MANY:
            assert passes.of(tokens, before + tokens) <= 2.5 * peak, before


@pytest.mark.parametrize("kind", ["state space", "quantised", "latent"])
def test_models_with_layers_of_other_kinds_are_measured_at_once(kind: str) -> None:
    assert not FirstPass(kv_model(kind)).ordinary


def _peak(model: Any, tokens: int, before: int) -> int:
    """Bytes at the peak of a pass over `tokens` behind `before`, without the KV that it adds."""
    row = _row(model, before)

    def run() -> None:
        model(mx.zeros((1, tokens), mx.int32), cache=row)
        kv.evaluate(row)

    return peak_bytes(run)


def _row(model: Any, length: int) -> kv.RowCache:
    row = kv.new_row(model)
    for start in range(0, length, 256):
        model(mx.zeros((1, min(256, length - start)), mx.int32), cache=row)
        kv.evaluate(row)
    return row


# Attention as on CUDA: fused, but an array mask becomes a number for each head in a first step.


def _attention_of_cuda(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: None = None,
) -> mx.array:
    """Stand-in that allocates what the fused kernel does, and computes something else."""
    heads = queries.shape[1] // keys.shape[1]
    mean = mx.repeat(mx.mean(values, axis=2, keepdims=True), heads, axis=1)
    if isinstance(mask, mx.array):
        shape = (*queries.shape[:3], keys.shape[2])
        bias = mx.where(mx.broadcast_to(mask, shape), mx.zeros(1), mx.array(-mx.inf))
        mean = mean + mx.max(bias.astype(queries.dtype), axis=-1, keepdims=True)
    return queries * scale + mean


HEADS: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 16}


def _charge(passes: PassCost, tokens: int, rows: int, seen: int, window: int = 0) -> int:
    """Bytes that the planner charges for a pass of rows with `tokens` tokens each."""
    cost = CacheCost(1, 0, ((1, window),) if window else ())
    charges = Charges(Limits(cost, 8, 1 << 40, 0, 0, 512, 250, passes=passes))
    prompt = [0] * seen
    one = SequenceState(Arrived(1, PrefixKey(prompt), prompt, 1), 0.0, 1)
    return charges.prefill_pass(one, tokens, seen, rows)


@pytest.mark.parametrize("lengths", [[1310, 1290], [1300, 900, 700, 500], [1300]], ids=str)
@pytest.mark.parametrize("tokens", [64, 220])  # for which the KV has room
def test_masks_of_rows_with_different_lengths_are_charged(
    lengths: Sequence[int], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", _attention_of_cuda)
    model = kv_model("attention", **HEADS)
    batch = kv.BatchCache([_row(model, length) for length in lengths])

    def run() -> None:
        layers = batch.layers
        model(mx.zeros((len(lengths), tokens), mx.int32), cache=layers)
        kv.evaluate(layers)

    peak = peak_bytes(run)
    charged = _charge(pass_cost(model, VOCABULARY), tokens, len(lengths), max(lengths) + tokens)
    assert peak <= 1.5 * charged <= 18 * peak + MIB


def _attention_of_metal(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: None = None,
) -> mx.array:
    """Stand-in that reads a mask as it is, and computes something else."""
    seen = mx.any(mask) if isinstance(mask, mx.array) else mx.array(True)
    heads = queries.shape[1] // keys.shape[1]
    return queries * scale + mx.repeat(values[:, :, :1], heads, axis=1) * seen


def test_a_mask_is_charged_where_attention_reads_it_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", _attention_of_metal)
    model = kv_model("attention", **HEADS)
    batch = kv.BatchCache([_row(model, length) for length in (1300, 1290)])
    (mask, *_) = (layer.make_mask(200) for layer in batch.layers)
    passes = pass_cost(model, VOCABULARY)
    alone, together = (_charge(passes, 200, rows, 1500) for rows in (1, 2))
    assert mask.nbytes <= together - 2 * alone <= 4 * mask.nbytes


@pytest.mark.parametrize("window", [60, 3000])
def test_the_mask_of_a_long_prompt_in_a_window_is_charged(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", _attention_of_cuda)
    model = kv_model("window", **HEADS, sliding_window=window)
    peak = _peak(model, 256, 3840)
    charged = _charge(pass_cost(model, VOCABULARY), 256, 1, 4096, window)
    assert peak <= 1.5 * charged <= 18 * peak + MIB


# Choosing tokens


def _as_on_cuda(sort: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A sort that also holds what MLX's CUDA kernel does: its input, and two of values and ids."""

    def sorted_(array: mx.array, axis: int = -1) -> mx.array:
        first = mx.min(array)  # so that all exists at the same time
        ids = [mx.broadcast_to(first, array.shape).astype(mx.uint32) for _ in range(2)]
        done: list[mx.array] = mx.depends([sort(array, axis=axis)], [array, array * 1, *ids])
        return done[0]

    return sorted_


CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "no filter": {},
    "penalties": {"repetition": 1.2, "presence": 0.2, "frequency": 0.1, "logit_bias": ((3, 1.0),)},
    "min_p": {"min_p": 0.1},
    "top_k": {"top_k": 40, "top_p": 0.9, "typical_p": 0.5},
    "large top_k": {"top_k": 10_000},
    "top_p": {"top_p": 0.9},
    "top_p of equal logits": {"top_p": 0.9, "min_p": 0.01},
    "typical_p": {"typical_p": 0.5},
    "XTC": {"xtc_probability": 1.0, "min_p": 0.1},
    "all": {
        "repetition": 1.2,
        "frequency": 0.1,
        "logit_bias": ((3, 1.0),),
        "typical_p": 0.9,
        "top_p": 0.9,
        "min_p": 0.1,
        "xtc_probability": 1.0,
    },
}


@pytest.fixture(params=[True, False], ids=["CPU order", "GPU order"])
def cpu_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: request.param)
    monkeypatch.setattr(mx, "sort", _as_on_cuda(mx.sort))
    monkeypatch.setattr(mx, "argsort", _as_on_cuda(mx.argsort))
    return bool(request.param)


@cache
def _cost_of_choosing(cpu_order: bool, vocabulary: int) -> PassCost:
    """Return the cost in one order, which `cpu_order` has set."""
    return steady_cost(kv_model("attention"), vocabulary)


@pytest.mark.parametrize("name", CHOICES)
def test_choosing_tokens_takes_no_more_than_the_estimated_memory(
    name: str, cpu_order: bool
) -> None:
    rows, vocabulary = 8, 20_000
    passes = _cost_of_choosing(cpu_order, vocabulary)
    row = Sampling(**({"temperature": 1.0} | CHOICES[name]))
    source = mx.random.normal((rows, vocabulary), key=mx.random.key(1)) * (name[:6] != "top_p ")
    mx.eval(source)

    def run() -> None:
        logits = source * 1
        sampler = BatchSampler([row] * rows, [Past((), 0, 64)] * rows, vocabulary)
        tokens = sampler(logits, mx.zeros(rows, mx.int32), [1] * rows)
        logprobs = BatchLogprobs([3] * rows)(logits, tokens)
        mx.eval(tokens, sampler.checked(logits, tokens), logprobs)

    charged = passes.per_choice + search_all(row, vocabulary) * passes.per_filter
    assert max(peak_bytes(run) for _ in range(3)) <= rows * charged
