"""Applies LoRA adapters of which each row of a batch uses one or none.

A layer computes W x + s B A x with A and B of the row's adapter. The A and the B of all adapters
that change a layer are stacked, padded to the largest rank, so that one product serves all rows.
Index 0 of a stack means no adapter: A and B are 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from backend.engine.device import gathers_half
from backend.engine.loading.adapter_layers import Part, sizes_of


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

    def __init__(self, base: Any, adapters: RowAdapters) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = base
        self._adapters = adapters
        self._ranks: dict[int, int] = {}  # by number, in the order of the stacks
        self._slots: tuple[int, ...] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        """The numbers of the adapters in the stacks, from index 1."""
        return self._slots

    @property
    def nbytes(self) -> int:
        return self.bytes_with({})

    def bytes_with(self, added: Mapping[int, int]) -> int:
        """Return the bytes of the stacks once they also have adapters of these ranks."""
        ranks = {**self._ranks, **added}
        width = sum(sizes_of(self.linear)) * self._adapters.dtype.size
        return (len(ranks) + 1) * max(ranks.values()) * width if ranks else 0

    def change(self, added: Mapping[int, Part], removed: Collection[int] = ()) -> None:
        """Add adapters to the stacks and remove others. After an error the stacks are as before."""
        dtype = self._adapters.dtype
        pairs = {
            number: (self.lora_a[at, :, :rank], self.lora_b[at, :rank])
            for at, (number, rank) in enumerate(self._ranks.items(), 1)
            if number not in removed
        }
        for number, part in added.items():
            second = part.scale * part.weights["lora_b"].astype(mx.float32)
            pairs[number] = (part.weights["lora_a"].astype(dtype), second.astype(dtype))
        ranks = {number: first.shape[1] for number, (first, _) in pairs.items()}
        if pairs:
            rank = max(ranks.values())
            inputs, outputs = sizes_of(self.linear)
            firsts, seconds = [mx.zeros((inputs, rank), dtype)], [mx.zeros((rank, outputs), dtype)]
            for first, second in pairs.values():
                missing = (0, rank - first.shape[1])
                firsts.append(mx.pad(first, [(0, 0), missing]))
                seconds.append(mx.pad(second, [missing, (0, 0)]))
            stacks = mx.stack(firsts), mx.stack(seconds)
            mx.eval(stacks)
            self.lora_a, self.lora_b = stacks
        self._ranks, self._slots = ranks, tuple(ranks)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        rows = self._adapters.rows
        if not rows:
            return y
        # For some layers, the tokens of all rows are in one dimension.
        if x.shape[0] != len(rows) and (x.size // x.shape[-1]) % self._adapters.tokens:
            raise ValueError("the layer gets some tokens only")
        chosen = self._adapters.indices(self._slots)
        if chosen is None:
            return y
        wide = x.reshape(len(rows), -1, x.shape[-1]).astype(self.lora_a.dtype)
        change = _product(_product(wide, self.lora_a, chosen), self.lora_b, chosen)
        return y + change.reshape(y.shape).astype(y.dtype)


def _product(rows: mx.array, matrices: mx.array, chosen: mx.array) -> mx.array:
    """Multiply each row by the matrix that it has chosen."""
    if rows.dtype == mx.float32 or gathers_half():
        return mx.gather_mm(rows, matrices, rhs_indices=chosen)
    return rows @ matrices[chosen]
