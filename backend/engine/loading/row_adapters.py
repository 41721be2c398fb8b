"""Applies LoRA and DoRA adapters of which each row of a batch uses one or none.

A layer computes (1 + g) W x + B A x with g, B and A of the row's adapter; g is 0 for LoRA. Those of
all adapters that change a layer are stacked, padded to the largest rank, so that one product serves
all rows. Index 0 of a stack means no adapter: all are 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from backend.engine.device import gathers_half
from backend.engine.loading.adapter_layers import Part, sizes_of
from backend.engine.loading.dense import dense_weight


class RowAdapters:
    """The adapters from which requests choose, and the choice of the pass that is being built.

    dtype: the type of the stacks.
    numbers: by name, the adapters that new requests may choose.
    loaded: the numbers of all adapters in memory. Those without a name leave when no running
        sequence uses them.
    changing: whether `loaded` is about to change.
    layers: by path, the layers that adapters change.
    tokens: the input of a layer that joins the rows has a multiple of so many vectors.
    """

    def __init__(self, dtype: mx.Dtype) -> None:
        self.dtype = dtype
        self.numbers: dict[str, int] = {}
        self.loaded: set[int] = set()
        self.changing = False
        self.layers: dict[str, ChoosingLinear] = {}
        self.tokens = 1
        self.rows: Sequence[int] = ()  # the number of each row's adapter; empty if none has one
        self._known: dict[str, int] = {}
        self._indices: dict[tuple[int, ...], mx.array | None] = {}

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    @property
    def unnamed(self) -> set[int]:
        """The adapters that no new request may choose; empty while adapters are loaded."""
        return set() if self.changing else self.loaded - set(self.numbers.values())

    def number(self, fingerprint: str) -> int:
        """Return the number, from 1, of an adapter with these contents.

        The number is in the keys of cached prefixes. Other contents never get it, not even under
        the same name.
        """
        return self._known.setdefault(fingerprint, len(self._known) + 1)

    @contextmanager
    def using(self, rows: Sequence[int]) -> Iterator[None]:
        """Choose each row's adapter, by number, for the passes that are built; 0 means none."""
        if any(rows):
            self.rows = rows
        try:
            yield
        finally:
            self.rows = ()
            self._indices.clear()

    def indices(self, slots: tuple[int, ...]) -> mx.array | None:
        """Return each row's index in a stack; None if no row's adapter is in it.

        slots: the number of the adapter at each index of the stack, from index 1.
        """
        if slots not in self._indices:
            at = [slots.index(row) + 1 if row in slots else 0 for row in self.rows]
            self._indices[slots] = mx.array(at, dtype=mx.uint32) if any(at) else None
        return self._indices[slots]


class ChoosingLinear(Module):
    """A linear layer that adds what the adapter of each row computes."""

    lora_a: mx.array
    lora_b: mx.array
    gain: mx.array

    def __init__(self, base: Any, adapters: RowAdapters) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = base
        self._adapters = adapters
        self._ranks: dict[int, int] = {}  # by number, in the order of the stacks
        self._slots: tuple[int, ...] = ()
        self._doras: list[int] = []  # the numbers of adapters whose gain is not 0

    @property
    def slots(self) -> tuple[int, ...]:
        """The numbers of the adapters in the stacks, from index 1."""
        return self._slots

    @property
    def nbytes(self) -> int:
        return self.bytes_with({})

    def bytes_with(self, added: Mapping[int, Part]) -> int:
        """Return the bytes of the stacks once they also have these adapters."""
        ranks = {**self._ranks, **{number: part.rank for number, part in added.items()}}
        if not ranks:
            return 0
        inputs, outputs = sizes_of(self.linear)
        width = max(ranks.values()) * (inputs + outputs) + outputs
        return (len(ranks) + 1) * width * self._adapters.dtype.size

    def change(self, added: Mapping[int, Part], removed: Collection[int] = ()) -> None:
        """Add adapters to the stacks and remove others. After an error the stacks are as before."""
        dtype = self._adapters.dtype
        kept = {
            number: (self.lora_a[at, :, :rank], self.lora_b[at, :rank], self.gain[at])
            for at, (number, rank) in enumerate(self._ranks.items(), 1)
            if number not in removed
        }
        parts = kept | {
            number: _in_type(part, self.linear, dtype) for number, part in added.items()
        }
        ranks = {number: first.shape[1] for number, (first, _, _) in parts.items()}
        if parts:
            rank = max(ranks.values())
            inputs, outputs = sizes_of(self.linear)
            firsts, seconds = [mx.zeros((inputs, rank), dtype)], [mx.zeros((rank, outputs), dtype)]
            gains = [mx.zeros(outputs, dtype)]
            for first, second, gain in parts.values():
                missing = (0, rank - first.shape[1])
                firsts.append(mx.pad(first, [(0, 0), missing]))
                seconds.append(mx.pad(second, [missing, (0, 0)]))
                gains.append(gain)
            stacks = mx.stack(firsts), mx.stack(seconds), mx.stack(gains)
            mx.eval(stacks)
            self.lora_a, self.lora_b, self.gain = stacks
        self._ranks, self._slots = ranks, tuple(ranks)
        doras = {number for number, part in added.items() if part.adapter.kind == "dora"}
        self._doras = [number for number in ranks if number in {*self._doras, *doras}]

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        rows = self._adapters.rows
        if not rows:
            return y
        # For some layers, the tokens of all rows are in one dimension.
        if x.shape[0] != len(rows) and (x.size // x.shape[-1]) % self._adapters.tokens:
            raise ValueError("a layer gets only some of the tokens")
        chosen = self._adapters.indices(self._slots)
        if chosen is None:
            return y
        wide = x.reshape(len(rows), -1, x.shape[-1]).astype(self.lora_a.dtype)
        change = _product(_product(wide, self.lora_a, chosen), self.lora_b, chosen)
        if self._doras:
            product = y - self._bias if self._bias is not None else y
            change += self.gain[chosen][:, None] * product.reshape(change.shape)
        return y + change.reshape(y.shape).astype(y.dtype)

    @property
    def _bias(self) -> mx.array | None:
        bias: mx.array | None = getattr(self.linear, "linear", self.linear).get("bias")
        return bias


def _in_type(part: Part, linear: Any, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Return an adapter's A, B and g of a layer."""
    first = part.weights["lora_a"]
    second = part.scale * part.weights["lora_b"].astype(mx.float32)
    gain = mx.zeros(second.shape[1])
    if part.adapter.kind == "dora":
        whole = dense_weight(linear, mx.float32) + (first @ second).T
        factor = part.weights["m"] / mx.linalg.norm(whole, axis=1)
        second, gain = second * factor, factor - 1
    return first.astype(dtype), second.astype(dtype), gain.astype(dtype)


def _product(rows: mx.array, matrices: mx.array, chosen: mx.array) -> mx.array:
    """Multiply each row by the matrix that it has chosen."""
    if rows.dtype == mx.float32 or gathers_half():
        return mx.gather_mm(rows, matrices, rhs_indices=chosen)
    return rows @ matrices[chosen]
