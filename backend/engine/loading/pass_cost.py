"""Measures the temporary memory of a forward pass, on the device that will run it.

Whether attention scores are materialised depends on the device, the head size, the mask and the
kind of KV. Two short passes measure that and the rest: one after a few tokens, and one after a long
KV filled with zeros. Layers with a recurrent state, and layers that compute keys and values from
what they store, need memory that does not grow with the tokens of a pass. So their models are also
measured with one token and with more tokens. The memory that an array as mask adds, which passes of
several rows need, is measured on the attention kernel alone, and the memory for choosing a token on
zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.caching.layer_kv import LayerKV, WindowKV
from backend.engine.cpu_kernels import functions_of_mlx
from backend.engine.device import return_buffers
from backend.engine.planning.plan import PassCost
from backend.engine.request import Sampling
from backend.engine.sampling.logits_head import FIRST_TOKENS
from backend.engine.sampling.logprobs import BatchLogprobs
from backend.engine.sampling.penalties import Past
from backend.engine.sampling.sampler import BatchSampler
from backend.engine.small_attention import COPIES, MOST_SCORES

_log = logging.getLogger(__name__)

_TOKENS = 8
# Recurrent layers compute passes of this length in chunks, and shorter passes token by token.
_MANY = 64
_SEEN = 2048
_PAIRED = 512  # tokens that attend to each other when `score_bytes` measures attention alone
_BUSY = 1 << 19  # numbers whose exponentials take a CPU 5 ms, in which it launches a short pass
# Longer passes use other kernels and have more arrays at once: at most this factor more memory.
_MARGIN = 1.5
# Bytes of a head for a pair of tokens without a fused kernel: scores and weights in float32, their
# mask, and half as much again.
_UNFUSED = 18
# The settings that need most memory without filters of the whole vocabulary, and with all of them.
_CHOICE = Sampling(
    temperature=1.0, logit_bias=((0, 1.0),), repetition=1.1, presence=0.1, frequency=0.1, min_p=0.1
)
_FILTERED = replace(_CHOICE, typical_p=0.5, top_p=0.5, xtc_probability=1.0)


class Attention(NamedTuple):
    """The form of a layer's attention in a pass of one row.

    columns: number of tokens to which the pass attends.
    """

    heads: int
    columns: int
    kv_heads: int
    size: int
    value_size: int
    dtype: mx.Dtype


class FirstPass:
    """The first pass of a model, whose results several measurements share.

    row: the KV of FIRST_TOKENS.
    logits: the logits of all these tokens, [1, tokens, vocabulary].
    attention: the forms of attention in the calls of MLX's kernel, in order.
    """

    def __init__(self, model: Any) -> None:
        """Run the pass. Raises what the model raises."""
        self.row = kv.new_row(model)
        with noted_attention() as self.attention:
            self.logits = kv.feed_tokens(model, self.row, [FIRST_TOKENS])

    @property
    def ordinary(self) -> bool:
        """Whether each layer passes exactly its stored keys and values to MLX's kernel.

        Layers that store shorter vectors, or select tokens to attend to, need more memory.
        """
        layers = [*kv.leaves(self.row)]
        if any(type(layer) not in (LayerKV, WindowKV) for layer in layers):
            return False
        known = len(FIRST_TOKENS)
        stored = [(known, *layer.keys.shape[1::2], layer.values.shape[3]) for layer in layers]
        return stored == [form[1:5] for form in self.attention]


@contextmanager
def noted_attention() -> Iterator[list[Attention]]:
    attend: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention
    forms: list[Attention] = []

    def noting(queries: mx.array, keys: mx.array, values: mx.array, **rest: Any) -> mx.array:
        kv_heads, columns, size = keys.shape[1:]
        heads, value_size = queries.shape[1], values.shape[3]
        forms.append(Attention(heads, columns, kv_heads, size, value_size, queries.dtype))
        return attend(queries, keys, values, **rest)

    mx.fast.scaled_dot_product_attention = noting  # type: ignore[assignment]
    try:
        yield forms
    finally:
        mx.fast.scaled_dot_product_attention = attend


def pass_cost(
    model: Any,
    vocabulary: int,
    first: FirstPass | None = None,
    *,
    all_logits: bool = False,
    bounded: bool = False,
) -> PassCost:
    """Measure the memory cost of a model's passes. Raises what the model raises.

    model: called with tokens and a cache; what it returns is not computed.
    first: the first pass; more tokens are added to its row.
    all_logits: whether the last pass of a prompt computes the logits of all its tokens.
    bounded: whether an upper bound of `per_pair` is enough, which needs no pass after a long KV.
        The model must be ordinary (`FirstPass`).
    """
    first = first or FirstPass(model)
    row = first.row
    heads = max((form.heads for form in first.attention), default=0)
    with functions_of_mlx() as small:
        if not first.ordinary:
            form = _form_of_passes(model, row)
        elif bounded:
            form = _Form(_temporary_bytes(model, row) / _TOKENS, heads * _UNFUSED / _MARGIN)
        else:
            short = _temporary_bytes(model, row)
            (long,) = _after_long_kv(model, row, {_TOKENS: short}).values()
            form = _Form(short / _TOKENS, max(long - short, 0) / (_TOKENS * _SEEN))
        masked = _mask_bytes(first.attention)
    copies = small * max((COPIES * form.dtype.size for form in first.attention), default=0)
    choice = _choice_bytes(_CHOICE, vocabulary)
    filtered = _choice_bytes(_FILTERED, vocabulary)
    return_buffers()
    return PassCost(
        per_token=round(_MARGIN * form.token) + all_logits * 2 * 4 * vocabulary,
        per_pair=_MARGIN * form.pair,
        per_row=round(_MARGIN * form.row),
        per_seen=_MARGIN * form.seen,
        step_seen=_MARGIN * form.step_seen,
        per_mask=_MARGIN * masked / (_TOKENS * _SEEN),
        per_choice=round(_MARGIN * choice),
        per_filter=round(_MARGIN * max(filtered - choice, 0)),
        per_small=round(_MARGIN * copies * heads),
        most_small=round(_MARGIN * copies * MOST_SCORES),
    )


class _Form(NamedTuple):
    """The bytes of a pass of one row, as `PassCost` defines them, without a margin."""

    token: float
    pair: float
    row: float = 0.0
    seen: float = 0.0
    step_seen: float = 0.0


def _form_of_passes(model: Any, row: kv.RowCache) -> _Form:
    """Measure passes of one, few and many tokens, and return an upper bound of their bytes."""
    short = {tokens: _temporary_bytes(model, row, tokens) for tokens in (1, _TOKENS, _MANY)}
    long = _after_long_kv(model, row, short)
    seen = {tokens: max(long[tokens] - nbytes, 0) / _SEEN for tokens, nbytes in short.items()}
    pair = max(seen[_MANY] - seen[_TOKENS], 0) / (_MANY - _TOKENS)
    pair = min(pair, seen[_TOKENS] / _TOKENS)
    token = max(short[_MANY] - short[_TOKENS], 0) / (_MANY - _TOKENS)
    return _Form(
        token,
        pair,
        row=max(0, *(nbytes - tokens * token for tokens, nbytes in short.items())),
        seen=max(seen[tokens] - tokens * pair for tokens in (_TOKENS, _MANY)),
        step_seen=max(seen[1] - pair, 0),
    )


def _after_long_kv(model: Any, row: kv.RowCache, short: Mapping[int, int]) -> dict[int, int]:
    """Return the bytes of passes of the same numbers of tokens, up to about `_SEEN` tokens of KV.

    short: by number of tokens, the bytes of a pass after a few tokens.
    """
    try:
        _lengthen(row, _SEEN - 2 * sum(short) - len(FIRST_TOKENS))
        return {tokens: _temporary_bytes(model, row, tokens) for tokens in short}
    except Exception:
        # A cache that cannot be filled with zeros: assume as much again for every 256 tokens.
        _log.debug("the memory of a pass after a long text could not be measured", exc_info=True)
        return {tokens: nbytes * _SEEN // 256 for tokens, nbytes in short.items()}


def _temporary_bytes(model: Any, row: kv.RowCache, tokens: int = _TOKENS) -> int:
    """Return the peak bytes of a pass of this many more tokens, without the KV of these tokens."""

    def run() -> None:
        model(mx.zeros((1, tokens), mx.int32), cache=row)  # its logits are not evaluated
        kv.evaluate(row)

    return _peak_bytes(run, busy=True)


def _choice_bytes(sampling: Sampling, vocabulary: int) -> int:
    """Return the peak bytes of choosing the token of one row, with its log-probability."""

    def run() -> None:
        sampler = BatchSampler([sampling], [Past((), 0, _SEEN)], vocabulary)
        logits = mx.zeros((1, vocabulary))
        tokens = sampler(logits, mx.zeros(1, mx.int32), [0])
        mx.eval(tokens, BatchLogprobs([1])(logits, tokens))

    return _peak_bytes(run)


def _peak_bytes(run: Callable[[], None], *, busy: bool = False) -> int:
    """Return the bytes that a computation uses at its peak, without those of its results.

    busy: whether the device is busy at first, so that MLX allocates as far ahead of it as in a long
        pass, every time.
    """
    numbers = mx.zeros(_BUSY if busy else 1)
    mx.eval(numbers)
    mx.synchronize()
    return_buffers()
    exponentials = mx.exp(numbers)
    mx.async_eval(exponentials)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    mx.synchronize()
    return max(mx.get_peak_memory() - max(mx.get_active_memory(), before), 0)


def _mask_bytes(forms: Iterable[Attention]) -> int:
    """Return the peak bytes that an array as mask adds to attention to `_SEEN` tokens."""
    most = 0
    for heads, _, kv_heads, size, value_size, dtype in set(forms):
        queries = mx.zeros((1, heads, _TOKENS, size), dtype)
        keys = mx.zeros((1, kv_heads, _SEEN, size), dtype)
        values = mx.zeros((1, kv_heads, _SEEN, value_size), dtype)
        array = mx.ones((_TOKENS, _SEEN), mx.bool_)
        mx.eval(queries, keys, values, array)

        def run(
            mask: mx.array | str, parts: tuple[mx.array, ...] = (queries, keys, values)
        ) -> None:
            mx.eval(mx.fast.scaled_dot_product_attention(*parts, scale=1.0, mask=mask))

        plain, masked = (_peak_bytes(partial(run, mask)) for mask in ("causal", array))
        most = max(most, max(masked - plain, 0) + array.nbytes)
    return most


def score_bytes(form: Attention) -> float:
    """Return the peak bytes of attention per pair of tokens; 0 with a fused kernel."""
    heads, _, kv_heads, size, value_size, dtype = form
    sizes = (heads, size), (kv_heads, size), (kv_heads, value_size)
    parts = [mx.zeros((1, number, _PAIRED, width), dtype) for number, width in sizes]
    mx.eval(parts)
    results = heads * _PAIRED * value_size * dtype.size

    def run() -> None:
        mx.eval(mx.fast.scaled_dot_product_attention(*parts, scale=1.0))

    return max(_peak_bytes(run) - results, 0) / _PAIRED**2


def _lengthen(row: kv.RowCache, tokens: int) -> None:
    """Append zeros to the layers that store keys and values."""
    for layer in kv.leaves(row):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and values is not None:
            layer.update_and_fetch(*(_zeros(layer, part, tokens) for part in (keys, values)))
    kv.evaluate(row)


def _zeros(layer: Any, like: Any, tokens: int) -> mx.array:
    """Return zeros like a layer's keys or values, [1, heads, tokens, size]."""
    array = like[1] if isinstance(like, tuple) else like
    size = layer.packing.size(like) if isinstance(like, tuple) else like.shape[3]
    return mx.zeros((1, array.shape[1], tokens, size), array.dtype)
