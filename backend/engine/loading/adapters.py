"""Finds the adapters of a load request and checks their files.

An adapter is a folder as `mlx_lm.lora` or PEFT writes it: adapter_config.json, and
adapters.safetensors or adapter_model.safetensors. Everything that the files alone show is checked
here, on the file thread and without MLX; `adapter_layers` puts them into a model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from backend.engine.errors import EngineError, InvalidRequest, ModelRejected, Unusable, beginning
from backend.engine.load_request import AdapterRequest
from backend.engine.loading.folder import read_object, readable, require_regular_files
from backend.engine.loading.model_reference import HubModel, resolve
from backend.engine.loading.peft import WEIGHTS as PEFT_WEIGHTS
from backend.engine.loading.peft import Peft, part_of, read_peft
from backend.engine.loading.shards import read_header
from common.wording import shown

CONFIG = "adapter_config.json"
WEIGHTS = "adapters.safetensors"

_KINDS: dict[str, frozenset[str]] = {
    "lora": frozenset(("lora_a", "lora_b")),
    "dora": frozenset(("lora_a", "lora_b", "m")),
    "full": frozenset(),
}
_FLOATS = ("F32", "F16", "BF16")

_CANNOT = "adapter {} cannot be applied"

Axes = tuple[int, ...]
Kind = Literal["lora", "dora", "full"]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter whose files are complete and consistent.

    kind: `lora` adds to layers, `dora` also sets the magnitude of their weights, `full` replaces
        weights.
    scale: the request's scale. In mlx-lm's format, it is multiplied by the adapter's scale; PEFT's
        scale may differ between layers and is in `peft`.
    digest: SHA-256 of the weights file, followed by `peft`.
    peft: the contents of a configuration in PEFT's format; None for mlx-lm's format.
    task: whether the adapter is a part of the checkpoint. Such an adapter may also have weights for
        layers that are not served.
    """

    name: str
    kind: Kind
    weights: Path
    scale: float
    digest: str
    peft: Peft | None = None
    task: bool = False

    @property
    def fingerprint(self) -> str:
        """Identifies what the adapter computes."""
        return json.dumps([self.kind, self.digest, self.scale])

    def rejected(self, reason: str) -> ModelRejected:
        return ModelRejected(f"{_CANNOT.format(shown(self.name))}: {reason}")


def find_adapters(
    requests: Sequence[AdapterRequest], model_path: str, cancel: threading.Event
) -> tuple[Adapter, ...]:
    """Resolve, download and check all adapters of a load.

    A reference is an absolute path, a folder under `model_path`, or a repository on the hub, as for
    models. Raises ModelNotFound, ModelRejected, InvalidRequest, Cancelled.
    """
    adapters: list[Adapter] = []
    for request in requests:
        adapter = inspect_adapter(_folder(request, model_path, cancel), request)
        if any(other.weights == adapter.weights for other in adapters):
            raise InvalidRequest(f"adapter {shown(adapter.name)} is named twice")
        adapters.append(adapter)
    require_addable(adapters)
    return tuple(adapters)


def require_addable(adapters: Sequence[Adapter]) -> None:
    """Raise InvalidRequest for several adapters of which one cannot be added to others."""
    for adapter in adapters:
        if adapter.kind != "lora" and len(adapters) > 1:
            raise InvalidRequest(
                f"adapter {shown(adapter.name)} is of the kind {adapter.kind}, which cannot be"
                " added to others: name it alone"
            )


def adapters_digest(adapters: Sequence[Adapter]) -> str:
    """Return a string that identifies the adapters in the keys of caches; '' if there are none."""
    if not adapters:
        return ""
    parts = f"[{', '.join(adapter.fingerprint for adapter in adapters)}]"
    return hashlib.sha256(parts.encode()).hexdigest()


def _folder(request: AdapterRequest, model_path: str, cancel: threading.Event) -> Path:
    name = request.reference
    # For a name that is too long, or has a zero byte, `Path.is_file` raises an error.
    if os.path.isfile(Path(model_path) / name.strip()):  # noqa: PTH113
        raise ModelRejected(
            f"{_CANNOT.format(shown(name))}: it is a file; name the folder with {CONFIG} and"
            f" {WEIGHTS}"
        )
    try:
        found = resolve(name, model_path=model_path)
        if not isinstance(found, HubModel):
            return found.path
        from backend.engine.loading.hub_process import cache_for, fetch

        return fetch(found, (CONFIG, WEIGHTS, PEFT_WEIGHTS), cache_for(found), cancel)
    except EngineError as error:
        # `resolve` and `fetch` write their messages about a model.
        raise type(error)(str(error).replace("model ", "adapter ", 1)) from None


def inspect_adapter(folder: Path, request: AdapterRequest, part: str = "") -> Adapter:
    """Check the files of an adapter. Raises ModelRejected, InvalidRequest.

    part: the adapter's name, if the file has several adapters.
    """
    name = request.reference
    with beginning(_CANNOT.format(shown(name))), readable(folder):
        files = frozenset(entry.name for entry in folder.iterdir())
        _require_files(files)
        require_regular_files(folder)
        config = read_object(folder / CONFIG)
        is_peft = "peft_type" in config
        weights = PEFT_WEIGHTS if is_peft else WEIGHTS
        if weights not in files:
            raise Unusable(f"its weights are missing: the folder has no {weights}")
        tensors = _read_tensors(folder / weights)
        peft, rank, scale = None, None, 1.0
        if is_peft:
            peft = replace(read_peft(config), name=part)
            kind: Kind = "dora" if peft.dora else "lora"
            tensors = _in_mlx_lm_form(tensors, part)
        elif (kind := _kind(config)) != "full":
            rank, scale = _parameters(config)
        if kind != "lora" and request.scale != 1:
            raise InvalidRequest(
                f"adapter {shown(name)} has the scale {request.scale:g}, but adapters of the kind"
                f" {kind} cannot be scaled: leave its scale out"
            )
        if kind != "full":
            _require_pairs(kind, tensors, rank)
        with (folder / weights).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        digest += repr(peft) if peft else ""
    path = (folder / weights).resolve()
    return Adapter(name, kind, path, scale * request.scale, digest, peft)


def _in_mlx_lm_form(tensors: Mapping[str, Axes], adapter: str) -> dict[str, Axes]:
    """Return the shapes of PEFT's tensors, by the names and with the axes that mlx-lm gives them.

    adapter: the adapter's name in the file; '' if the file has one adapter without a name.
    """
    parts = {part_of(tensor): shape for tensor, shape in tensors.items()}
    named = sorted({part.name for part in parts if part} - {"", "default"})
    if adapter:
        parts = {part: shape for part, shape in parts.items() if part and part.name == adapter}
    elif named:
        raise Unusable(
            f"it has the adapters {', '.join(map(shown, named))}, not one without a name"
        )
    found = {
        f"{part.layer}.{part.part}": shape[::-1]
        for part, shape in parts.items()
        if part and part.part != "bias"
    }
    if not found:
        raise Unusable(f"{PEFT_WEIGHTS} has no weights of a LoRA adapter")
    return found


def _require_files(files: frozenset[str]) -> None:
    if CONFIG in files and "adapter_model.bin" in files and PEFT_WEIGHTS not in files:
        raise Unusable(
            "its weights are a PyTorch file, adapter_model.bin: use a version that has"
            f" {PEFT_WEIGHTS}",
        )
    if CONFIG in files:
        return
    if "config.json" in files:
        raise Unusable("it is a complete model, not an adapter: set Model to it")
    raise Unusable(f"the folder has no {CONFIG}")


def _kind(config: Mapping[str, Any]) -> Kind:
    kind = config.get("fine_tune_type", "lora")
    if isinstance(kind, str) and kind in _KINDS:
        return cast(Kind, kind)
    raise Unusable(f"its fine_tune_type {shown(kind)} is not lora, dora or full")


def _parameters(config: Mapping[str, Any]) -> tuple[int, float]:
    """Return the rank and the scale, from the object in which mlx-lm stores them."""
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise Unusable(f"{CONFIG} has no lora_parameters, so it is not an adapter of mlx-lm")
    rank, scale = parameters.get("rank"), parameters.get("scale")
    if type(rank) is not int or rank < 1:
        raise Unusable(f"the rank in {CONFIG} is {shown(rank)}, not a whole number above 0")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        hint = ", and alpha is not the same" if scale is None and "alpha" in parameters else ""
        raise Unusable(f"the scale in {CONFIG} is {shown(scale)}, not a number{hint}")
    return rank, float(scale)


def _read_tensors(path: Path) -> dict[str, Axes]:
    with path.open("rb") as file:
        header, _ = read_header(path.name, file, path.stat().st_size)
    if not header:
        raise Unusable(f"{path.name} has no weights")
    for tensor, entry in header.items():
        if entry["dtype"] not in _FLOATS:
            raise Unusable(
                f"{shown(tensor)} has the type {shown(entry['dtype'])}, not a floating-point one"
            )
    return {tensor: tuple(entry["shape"]) for tensor, entry in header.items()}


def _require_pairs(kind: Kind, shapes: Mapping[str, Axes], rank: int | None) -> None:
    """Require that every layer has all weights of the kind, with this rank; None means any rank."""
    layers: dict[str, set[str]] = {}
    for tensor in shapes:
        layer, _, part = tensor.rpartition(".")
        if not layer or part not in _KINDS[kind]:
            raise Unusable(f"{shown(tensor)} is not a weight of a {kind} adapter")
        layers.setdefault(layer, set()).add(part)
    for layer, parts in layers.items():
        if missing := sorted(_KINDS[kind] - parts):
            raise Unusable(f"layer {shown(layer)} has no {missing[0]}")
        first, second = shapes[f"{layer}.lora_a"], shapes[f"{layer}.lora_b"]
        if len(first) != len(second) or len(first) not in (2, 3):
            raise Unusable(
                f"lora_a and lora_b of layer {shown(layer)} have shapes {first} and {second}"
            )
        ranks = {first[1], second[0] if len(second) == 2 else second[2]}
        if rank is None and len(ranks) > 1:
            raise Unusable(f"layer {shown(layer)} has the ranks {sorted(ranks)}")
        if rank is not None and ranks != {rank}:
            other = next(iter(ranks - {rank}))
            raise Unusable(f"layer {shown(layer)} has rank {other}, but {CONFIG} says {rank}")
