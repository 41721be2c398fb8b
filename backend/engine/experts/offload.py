"""Replaces the experts of a model by caches, while its weights are still lazy."""

from __future__ import annotations

import logging
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from backend.engine.engine_state import ExpertCounts
from backend.engine.experts.expert_tensors import LocationFinder
from backend.engine.experts.layer_cache import LayerCache, Parameter
from backend.engine.experts.read_ahead import Router
from backend.engine.experts.weight_files import WeightFiles
from backend.engine.loading.stages import Stages
from backend.engine.units import MIB
from common.wording import shown

_log = logging.getLogger(__name__)

_MOST_PORTION = 16 * MIB  # maximum number of bytes that are read before they are written to slots
_PACKAGES = ("mlx_lm", "mlx_vlm")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "fc1", "fc2")
_NAMES = ("SwitchGLU", "SwitchMLP", "SwitchLinear", "QuantizedSwitchLinear")
# In memory at the same time: the next portion; the current portion as read, as converted and as
# written; and the portion that is read ahead.
_PORTIONS = 5
_NUMBER = re.compile(r"\d+")


class NotOffloadedError(ValueError):
    """The experts cannot stay in the files. The text is a clause for the message to the user."""


@dataclass(frozen=True, slots=True)
class CachedExperts:
    """The cache of a model's experts."""

    nbytes: int  # the size of all slots
    working_bytes: int  # the maximum size of the buffers for reading
    packed: bool  # whether the experts are quantised in memory
    counts: ExpertCounts


class _SlotLayer(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn is untyped
    """Replaces mlx-lm's layer of experts. The slots are not among the model's parameters."""

    def __init__(self, cache: LayerCache) -> None:
        super().__init__()
        self.cache = cache

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        return self.cache(x, indices)


def expert_bytes(model: Any) -> int:
    """Return the size in memory of all experts that could stay in the files."""
    return sum(
        values.nbytes for _, switch in _switches(model) for *_, values in _parameters(switch)
    )


def offload(
    model: Any, name: str, folder: Path, budget: int, free: int | None = None
) -> Stages[CachedExperts]:
    """Replace the experts of a model with lazy weights by caches. Ends on `engine`.

    Raises NotOffloadedError, after which the model cannot be used.

    folder: the checkpoint's folder.
    budget: maximum bytes of all caches, including the buffers for reading.
    free: bytes that other weights leave; None if the budget is known to fit.
    """
    switches = dict(_switches(model))
    if not switches:
        raise NotOffloadedError("the model has no experts that could stay in its files")
    for path, switch in switches.items():
        if any(type(projection) not in _classes("Linear") for _, projection in _parts(switch)):
            raise NotOffloadedError(
                f"an adapter changes the experts of {path}, but adapters are applied only to"
                " experts in memory"
            )
    sizes = [_size_of(switch) for switch in switches.values()]
    experts = max(_count(switch) for switch in switches.values())
    slots, portion = slots_of(budget, sizes)
    if slots < 1:
        least = sum(sizes) + _PORTIONS * portion
        raise NotOffloadedError(
            f"a cache of {budget // MIB} MiB cannot hold one expert of each layer, which takes"
            f" {-(-least // MIB)} MiB"
        )
    slots = min(slots, experts)
    needed = slots * sum(sizes) + _PORTIONS * portion
    if free is not None and needed > free:
        raise NotOffloadedError(
            f"its cache takes {-(-needed // MIB)} MiB, but other weights leave {free // MIB} MiB of"
            " the memory that MLX may use"
        )
    counts = ExpertCounts(slots=slots, experts=experts, layers=len(switches))
    files = WeightFiles(folder, counts)
    finder = LocationFinder(files)
    caches: dict[str, LayerCache] = {}
    for path, switch in switches.items():
        parameters: list[Parameter] = []
        for part, projection, key, values in _parameters(switch):
            yield "engine"
            mx.eval(values)
            location = yield from finder.find(f"{path}.{part}.{key}", values)
            if location is None:
                raise NotOffloadedError(
                    f"the checkpoint's files do not contain {path}.{part}.{key} in the form in"
                    " which the model uses it"
                )
            own = min(slots, values.shape[0])
            projection[key] = mx.zeros((own, *values.shape[1:]), values.dtype)
            mx.eval(projection[key])
            parameters.append(Parameter(projection, key, location))
        caches[path] = LayerCache(switch, parameters, files, portion, counts)
    _link(model, caches)
    layers = [(path, _SlotLayer(cache)) for path, cache in caches.items()]
    model.update_modules(tree_unflatten(layers))
    counts.read_bytes, counts.wait_seconds = 0, 0.0
    nbytes = sum(cache.nbytes for cache in caches.values())
    _log.info(
        "model %s: the experts of %d layers stay in its files; a cache of %d MiB has %d of the %d"
        " experts of each layer",
        shown(name),
        len(switches),
        nbytes // MIB,
        slots,
        experts,
    )
    packed = any("scales" in each for switch in switches.values() for _, each in _parts(switch))
    return CachedExperts(nbytes, _PORTIONS * portion, packed, counts)


def _link(model: Any, caches: Mapping[str, LayerCache]) -> None:
    """Link each layer to the next layer whose path differs only in numbers."""
    stacks: defaultdict[str, list[str]] = defaultdict(list)
    for path in caches:
        stacks[_NUMBER.sub("", path)].append(path)
    modules = dict(model.named_modules())
    for paths in stacks.values():
        paths.sort(key=lambda path: [int(number) for number in _NUMBER.findall(path)])
        for path, after in pairwise(paths):
            # The router is beside the layer of experts, or beside the module around it.
            parts = after.split(".")
            around = [modules.get(".".join(parts[:-depth]), ()) for depth in (1, 2)]
            caches[path].following = caches[after], Router(around, caches[after].experts)


def slots_of(budget: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the number of slots of each layer, and the bytes of a portion.

    budget: as for `offload`.
    sizes: the bytes of one expert of each layer.
    """
    # A larger portion must not take the memory of the first slots.
    portion = max(min(_MOST_PORTION, (budget - sum(sizes)) // 16), *sizes)
    return (budget - _PORTIONS * portion) // sum(sizes), portion


def _classes(ending: str) -> set[type]:
    """Return classes of mlx-lm and mlx-vlm for layers of experts, or for their projections.

    Derived classes do not count, because they may use the expert numbers in other ways.

    ending: the ending of the classes' names.
    """
    modules = [sys.modules.get(f"{package}.models.switch_layers") for package in _PACKAGES]
    return {
        getattr(module, name)
        for module in modules
        if module is not None
        for name in _NAMES
        if name.endswith(ending)
    }


def _switches(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and module of each layer of experts."""
    kinds = _classes("GLU") | _classes("MLP")
    return ((path, module) for path, module in model.named_modules() if type(module) in kinds)


def _parts(switch: Any) -> list[tuple[str, Any]]:
    """Return the name and module of each projection of a layer of experts."""
    return [(name, switch[name]) for name in _PROJECTIONS if name in switch]


def _parameters(switch: Any) -> Iterator[tuple[str, Any, str, mx.array]]:
    """Yield each parameter: the projection's name, the projection, the name and the values."""
    for part, projection in _parts(switch):
        for key, values in projection.items():
            if isinstance(values, mx.array):
                yield part, projection, key, values


def _count(switch: Any) -> int:
    """Return the number of a layer's experts."""
    return max(values.shape[0] for *_, values in _parameters(switch))


def _size_of(switch: Any) -> int:
    """Return the size of one expert in memory."""
    return sum(values.nbytes for *_, values in _parameters(switch)) // _count(switch)
