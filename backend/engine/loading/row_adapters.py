"""Applies LoRA adapters of which each row of a batch uses one or none.

A layer computes W x + s B A x with A and B of the row's adapter. The A and the B of all adapters
are stacked, padded to the largest rank, so that one product serves all rows. Index 0 means no
adapter: A and B are 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from backend.engine.caching import kv
from backend.engine.device import gathers_half
from backend.engine.errors import ModelRejected
from backend.engine.loading.adapter_layers import Part, contents, layer_at, require_shapes
from backend.engine.loading.early_layers import only_building
from common.field_names import named
from common.wording import shown

if TYPE_CHECKING:
    from backend.engine.loading.adapters import Adapter

# Exactly these classes: their input has one vector for each token of each row.
_CHOOSABLE = (Linear, QuantizedLinear, LoRALinear)
_TRIAL = (1, 2, 3, 4, 5)  # tokens; experts that read some of them hardly ever read all


class RowAdapters:
    """The adapters from which requests choose, and the choice of the pass that is being built.

    names: an adapter's index is its position in this sequence plus 1.
    chosen: the index of each row's adapter, [rows]; None if no row has an adapter.
    tokens: the input of a layer that joins the rows has a multiple of so many vectors.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.chosen: mx.array | None = None
        self.tokens = 1

    def index(self, name: str) -> int:
        """Return the index of an adapter; 0 for ''."""
        return self.names.index(name) + 1 if name else 0

    @contextmanager
    def using(self, names: Sequence[str]) -> Iterator[None]:
        """Choose the adapter of each row for the passes that are built meanwhile; '' means none."""
        if any(names):
            self.chosen = mx.array([self.index(name) for name in names], dtype=mx.uint32)
        try:
            yield
        finally:
            self.chosen = None


class ChoosingLinear(Module):
    """A linear layer that adds what the adapter of each row computes."""

    def __init__(self, base: Any, adapters: RowAdapters, parts: Mapping[int, Part]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = base
        self._adapters = adapters
        rank = max(part.rank for part in parts.values())
        inputs, outputs = next(
            (part.weights["lora_a"].shape[0], part.weights["lora_b"].shape[1])
            for part in parts.values()
        )
        dtype = next(part.weights["lora_a"].dtype for part in parts.values())
        first = [mx.zeros((inputs, rank), dtype)] * (len(adapters.names) + 1)
        second = [mx.zeros((rank, outputs), dtype)] * (len(adapters.names) + 1)
        for index, part in parts.items():
            missing = rank - part.rank
            first[index] = mx.pad(part.weights["lora_a"].astype(dtype), [(0, 0), (0, missing)])
            second[index] = mx.pad(
                part.scale * part.weights["lora_b"].astype(dtype), [(0, missing), (0, 0)]
            )
        self.lora_a = mx.stack(first)
        self.lora_b = mx.stack(second)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        chosen = self._adapters.chosen
        if chosen is None:
            return y
        # For some layers, the tokens of all rows are in one dimension.
        if x.shape[0] != chosen.size and (x.size // x.shape[-1]) % self._adapters.tokens:
            raise ValueError("the layer gets some tokens only")
        rows = x.reshape(chosen.size, -1, x.shape[-1]).astype(self.lora_a.dtype)
        change = _product(_product(rows, self.lora_a, chosen), self.lora_b, chosen)
        return y + change.reshape(y.shape).astype(y.dtype)


def _product(rows: mx.array, matrices: mx.array, chosen: mx.array) -> mx.array:
    """Multiply each row by the matrix that it has chosen."""
    if rows.dtype == mx.float32 or gathers_half():
        return mx.gather_mm(rows, matrices, rhs_indices=chosen)
    return rows @ matrices[chosen]


def add_choices(model: Any, choices: Mapping[str, Adapter]) -> RowAdapters:
    """Let rows choose among adapters. Raises ModelRejected, after which the model is unusable."""
    adapters = RowAdapters(list(choices))
    modules = dict(model.named_modules())
    layers: dict[str, dict[int, Part]] = {}
    for name, adapter in choices.items():
        whole, parts = contents(model, adapter, modules)
        if adapter.kind != "lora":
            raise _rejected(adapter, f"it is of the kind {adapter.kind}")
        if whole:
            raise _rejected(adapter, f"it replaces {shown(next(iter(whole)))}")
        for path, part in parts:
            base = layer_at(path, modules, adapter)
            if type(base) not in _CHOOSABLE:
                raise _rejected(adapter, f"it adapts {shown(path)}, a {type(base).__name__}")
            if not any(map(str.isdigit, path.split("."))):  # the output layer gets fewer tokens
                raise _rejected(adapter, f"it adapts {shown(path)}, which is outside the blocks")
            if hasattr(modules.get(path.rpartition(".")[0]), "_decode_core"):
                raise _rejected(adapter, f"it adapts {shown(path)}, part of a compiled function")
            require_shapes(path, part, getattr(base, "linear", base))
            layers.setdefault(path, {})[adapters.index(name)] = part
    choosing = [
        (path, ChoosingLinear(modules[path], adapters, parts)) for path, parts in layers.items()
    ]
    model.update_modules(tree_unflatten(choosing))
    return adapters


def require_rows(name: str, model: Any, adapters: RowAdapters) -> None:
    """Raise ModelRejected if a model's layers do not get all tokens of each row.

    Some models read a layer's weights themselves, or give each expert the tokens of its own.
    """
    adapters.tokens = len(_TRIAL)
    try:
        with only_building(), adapters.using(adapters.names[:1]):
            model(mx.array([_TRIAL]), cache=kv.new_row(model))
    except Exception as error:
        raise ModelRejected.because(
            name,
            "option adapters is set, but the model uses layers that they adapt in a way in which"
            f" requests cannot choose ({error}): remove the option, or name one adapter in"
            f" {named('LoraAdapter')}",
        ) from None
    finally:
        adapters.tokens = 1


def _rejected(adapter: Adapter, why: str) -> Exception:
    return adapter.rejected(
        f"requests cannot choose it, because {why}: name it in LoraAdapter of a model of its own"
    )
