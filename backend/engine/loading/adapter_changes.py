"""Loads the adapters from which requests choose, and removes them, also while the model serves.

Each layer's stacks change between two steps of the running sequences. Layers find an adapter by its
number, so the stacks of one layer may change before those of another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from backend.engine.caching import kv
from backend.engine.errors import ModelRejected
from backend.engine.loading.adapter_layers import Part, contents, layer_at, require_shapes
from backend.engine.loading.adapters import Adapter
from backend.engine.loading.early_layers import only_building
from backend.engine.loading.row_adapters import ChoosingLinear, RowAdapters
from backend.engine.loading.stages import Stages
from backend.engine.units import MIB
from common.field_names import named
from common.wording import shown

# Exactly these classes: their input has one vector for each token of each row.
_CHOOSABLE = (Linear, QuantizedLinear, LoRALinear)
_TRIAL = (1, 2, 3, 4, 5)  # tokens; experts that read some of them hardly ever read all
_STAGE_BYTES = 32 * MIB


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
    """Return the adapters' weights by layer and number. Raises ModelRejected."""
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
