"""Adapters of which each row of a batch uses one or none, also loaded while the model serves.

A layer computes (1 + g) W x + B A x with g, B and A of the row's adapter; g is 0 for LoRA. Those of
all adapters that change a layer are stacked, padded to the largest rank, so that one product serves
all rows. Index 0 of a stack means no adapter: all are 0.

Each layer's stacks change between two steps of the running sequences. Layers find an adapter by its
number, so the stacks of one layer may change before those of another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from backend.engine.caching import kv
from backend.engine.device import gathers_half
from backend.engine.errors import ModelRejected
from backend.engine.loading.adapter_layers import Part, contents, layer_at, require_shapes, sizes_of
from backend.engine.loading.adapters import Adapter
from backend.engine.loading.dense import dense_weight
from backend.engine.loading.early_layers import only_building
from backend.engine.loading.stages import Stages
from backend.engine.loading.weights import dtype_of
from backend.engine.units import MIB
from common.field_names import named
from common.wording import shown

# Exactly these classes: their input has one vector for each token of each row.
_CHOOSABLE = (Linear, QuantizedLinear, LoRALinear)
_TRIAL = (1, 2, 3, 4, 5)  # tokens; experts that read some of them hardly ever read all
_STAGE_BYTES = 32 * MIB


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
    def token_bytes(self) -> int:
        """The most bytes per token that a layer of a pass needs for what adapters compute."""
        return max((layer.token_bytes for layer in self.layers.values()), default=0)

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

    @property
    def token_bytes(self) -> int:
        """Bytes per token of the input, and of the change of the output and its parts."""
        inputs, outputs = sizes_of(self.linear)
        return (inputs + (2 + bool(self._doras)) * outputs) * self._adapters.dtype.size

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
        change = mx.gather_mm(wide, self.lora_a, rhs_indices=chosen)
        change = mx.gather_mm(change, self.lora_b, rhs_indices=chosen)
        if self._doras:
            bias = getattr(self.linear, "linear", self.linear).get("bias")
            product = y if bias is None else y - bias
            change += self.gain[chosen][:, None] * product.reshape(change.shape)
        return y + change.reshape(y.shape).astype(y.dtype)


def _in_type(part: Part, linear: Any, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    first = part.weights["lora_a"]
    second = part.scale * part.weights["lora_b"].astype(mx.float32)
    gain = mx.zeros(second.shape[1])
    if part.adapter.kind == "dora":
        whole = dense_weight(linear, mx.float32) + (first @ second).T
        factor = part.weights["m"] / mx.linalg.norm(whole, axis=1)
        second, gain = second * factor, factor - 1
    return first.astype(dtype), second.astype(dtype), gain.astype(dtype)


def no_adapters(model: Any) -> RowAdapters:
    """Return the adapters of a model before any is loaded."""
    return RowAdapters(getattr(mx, dtype_of(model)) if gathers_half() else mx.float32)


def choose_among(
    wanted: Mapping[str, Adapter], model: Any, adapters: RowAdapters, reserve: Callable[[int], None]
) -> Stages[None]:
    """Load the adapters that are missing, and let requests choose exactly these. Ends on `engine`.

    After an error, all is as before. Adapters that requests may not choose any more stay in memory
    until `remove`.

    reserve: called with the bytes of all adapters in memory; raises if they do not fit.
    Raises ModelRejected, and what `reserve` raises.
    """
    yield "engine"
    numbers = {name: adapters.number(adapter.fingerprint) for name, adapter in wanted.items()}
    new = {
        numbers[name]: adapter
        for name, adapter in wanted.items()
        if numbers[name] not in adapters.loaded
    }
    parts = _parts(model, adapters, new)
    size = adapters.nbytes
    try:
        adapters.changing = True
        adapters.loaded |= new.keys()
        _wrap(model, adapters, parts)
        if new:
            _require_rows(model, adapters, next(iter(new)))
            needed = size
            for path, own in parts.items():
                layer = adapters.layers[path]
                needed += layer.bytes_with(own) - layer.nbytes
            reserve(needed + _working_bytes(parts))
        done = 0
        while parts:
            path, own = parts.popitem()
            adapters.layers[path].change(own)
            done += adapters.layers[path].nbytes
            if done >= _STAGE_BYTES:
                done = 0
                yield "engine"
        if new:
            reserve(adapters.nbytes)
        adapters.numbers = numbers
    except BaseException:
        remove(model, adapters, new.keys())
        reserve(adapters.nbytes)
        raise
    finally:
        adapters.changing = False


def remove(model: Any, adapters: RowAdapters, numbers: Collection[int]) -> None:
    """Remove adapters that no sequence uses from memory."""
    for path, layer in list(adapters.layers.items()):
        if not set(layer.slots).isdisjoint(numbers):
            layer.change({}, numbers)
        if not layer.slots:
            model.update_modules(tree_unflatten([(path, layer.linear)]))
            del adapters.layers[path]
    adapters.loaded -= set(numbers)


def _parts(
    model: Any, adapters: RowAdapters, new: Mapping[int, Adapter]
) -> dict[str, dict[int, Part]]:
    modules = dict(model.named_modules())
    modules |= {path: layer.linear for path, layer in adapters.layers.items()}
    layers: dict[str, dict[int, Part]] = {}
    for number, adapter in new.items():
        whole, parts = contents(model, adapter, modules)
        if adapter.kind == "full":
            raise _rejected(adapter, f"it is of the kind {adapter.kind}")
        if whole:
            raise _rejected(adapter, f"it replaces {shown(next(iter(whole)))}")
        for path, part in parts:
            base = layer_at(path, modules, adapter)
            if type(base) not in _CHOOSABLE or (
                adapter.kind == "dora" and type(base) is LoRALinear
            ):
                raise _rejected(adapter, f"it adapts {shown(path)}, a {type(base).__name__}")
            if not any(map(str.isdigit, path.split("."))):  # the output layer gets fewer tokens
                raise _rejected(adapter, f"it adapts {shown(path)}, which is outside the blocks")
            if hasattr(modules.get(path.rpartition(".")[0]), "_decode_core"):
                raise _rejected(adapter, f"it adapts {shown(path)}, part of a compiled function")
            if "bias" in part.weights:
                raise _rejected(adapter, f"it adds a bias to {shown(path)} (lora_bias)")
            require_shapes(path, part, getattr(base, "linear", base))
            layers.setdefault(path, {})[number] = part
    return layers


def _working_bytes(parts: Mapping[str, Mapping[int, Part]]) -> int:
    """Return the bytes that the change of one layer needs besides its stacks.

    For DoRA, the whole weight of a layer is computed.
    """
    sizes = (
        2 * mx.float32.size * part.weights["lora_a"].shape[0] * part.weights["lora_b"].shape[1]
        for own in parts.values()
        for part in own.values()
        if part.adapter.kind == "dora"
    )
    return max(sizes, default=0)


def _wrap(model: Any, adapters: RowAdapters, paths: Collection[str]) -> None:
    """Let layers choose, which do not yet."""
    modules = dict(model.named_modules())
    new = {
        path: ChoosingLinear(modules[path], adapters)
        for path in paths
        if path not in adapters.layers
    }
    model.update_modules(tree_unflatten(list(new.items())))
    adapters.layers |= new


def _require_rows(model: Any, adapters: RowAdapters, number: int) -> None:
    """Raise ModelRejected if a model's layers do not get all tokens of each row.

    Some models read a layer's weights themselves, or pass only some of the tokens to each expert.
    """
    adapters.tokens = len(_TRIAL)
    try:
        with only_building(), adapters.using([number]):
            model(mx.array([_TRIAL]), cache=kv.new_row(model))
    except Exception as error:
        raise ModelRejected(
            "option adapters is set, but requests to this model cannot choose adapters, because of"
            f" how it uses the layers that they change ({error}): remove the option, or name one"
            f" adapter in {named('LoraAdapter')}",
        ) from None
    finally:
        adapters.tokens = 1


def _rejected(adapter: Adapter, why: str) -> Exception:
    return adapter.rejected(
        f"requests cannot choose it, because {why}: name it in LoraAdapter of a model of its own"
    )
