"""Puts adapters into a model whose weights are still lazy, so that adapters are cast and counted
with the model's weights. All functions run on the engine thread.

The adapted layers are classes of mlx-lm. The names of an adapter's weights show which layers to
adapt. Several LoRA adapters of one layer add up, W + Σ sᵢBᵢAᵢ, and become one layer whose rank is
the sum of their ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from backend.engine.loading.adapters import Adapter
from backend.engine.loading.dense import dense_weight
from backend.engine.loading.peft import AS_IT_WAS, layers_of, part_of, rows_of, whole_name
from backend.engine.loading.untied_head import changes_one, own_path, untie
from common.wording import did_you_mean, shown

_Kinds = Mapping[type[Any], Any]
# The adapted layer of mlx-lm for each layer. Layers of derived classes may compute something else,
# so they are not adapted.
_LORA: _Kinds = {
    Linear: LoRALinear,
    QuantizedLinear: LoRALinear,
    SwitchLinear: LoRASwitchLinear,
    QuantizedSwitchLinear: LoRASwitchLinear,
    Embedding: LoRAEmbedding,
    QuantizedEmbedding: LoRAEmbedding,
}
_DORA: _Kinds = {Linear: DoRALinear, QuantizedLinear: DoRALinear, Embedding: DoRAEmbedding}

# Prefixes that transformers gives the layers of a text model, or of the text part of other models.
_OUTER = re.compile(
    r"^(model\.language_model\.(model\.)?|language_model\.(model\.)?|model\.|transformer\.)"
)
# The experts of a layer, of which `target_parameters` names one parameter or two.
_ALL_EXPERTS = re.compile(r"^(?P<layer>.+\.\d+)\.(?P<block>.+\.)?experts(\.base_layer)*$")
_EXPERT = re.compile(r"^(?P<block>.+)\.experts\.(?P<number>\d+)\.(?P<matrix>\w+)$")
# Names of an expert's matrices in Mixtral and families like it → mlx-lm's.
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What one adapter adds to one layer: `scale` times the product of its weights."""

    adapter: Adapter
    weights: dict[str, mx.array]
    scale: float

    @property
    def rank(self) -> int:
        return int(self.weights["lora_a"].shape[1])


def apply_adapters(model: Any, adapters: Sequence[Adapter]) -> None:
    """Add adapters to a model. Raises ModelRejected, after which the model is unusable."""
    for adapter in adapters if not hasattr(model, "own_paths") else ():
        if adapter.peft and any(changes_one(name, adapter.peft.saved) for name in _read(adapter)):
            untie(model)
    layers: dict[str, list[Part]] = {}
    modules = dict(model.named_modules())
    for adapter in adapters:
        whole, parts = contents(model, adapter, modules)
        _replace(model, adapter, whole)
        for path, part in parts:
            layers.setdefault(path, []).append(part)
        if adapter.task and not layers:
            raise adapter.rejected("its weights have no adapters for tasks")
    adapted = [(path, _adapted(path, modules, parts)) for path, parts in layers.items()]
    model.update_modules(tree_unflatten(adapted))


def _read(adapter: Adapter) -> dict[str, mx.array]:
    tensors = mx.load(str(adapter.weights))
    assert isinstance(tensors, dict)
    return tensors


def contents(
    model: Any, adapter: Adapter, modules: Mapping[str, Any]
) -> tuple[dict[str, mx.array], list[tuple[str, Part]]]:
    """Return the weights that an adapter replaces, and its parts with their layers' paths."""
    tensors = _read(adapter)
    if adapter.kind == "full":
        return tensors, []
    if adapter.peft is None:
        found: dict[str, dict[str, mx.array]] = {}
        for name in sorted(tensors):
            path, _, part = name.rpartition(".")
            found.setdefault(path, {})[part] = tensors[name]
        return {}, [(path, Part(adapter, found[path], adapter.scale)) for path in found]
    parts: list[tuple[str, Part]] = []
    layers = layers_of(tensors, adapter.peft)
    for name, (whole, scale) in layers.items():
        if _EXPERT.match(name):
            continue
        if _ALL_EXPERTS.match(name):
            parts += _of_all_experts(model, adapter, name, whole, modules)
            continue
        paths = _own_paths(model, name, modules)
        for path, weights in zip(paths, _divided(whole, len(paths)), strict=True):
            if path in modules or not adapter.task:
                parts.append((path, Part(adapter, weights, adapter.scale * scale)))
    for layer, experts in _experts(layers).items():
        (path,) = _own_paths(model, layer, modules)
        base = layer_at(path, modules, adapter)
        parts.append((path, Part(adapter, _stacked(experts, base), adapter.scale)))
    if adapter.task:
        return {}, parts
    return _saved_whole(model, tensors, modules) | _with_rows(model, adapter, modules), parts


_Experts = dict[int, tuple[mx.array, mx.array]]


def _experts(layers: Mapping[str, tuple[dict[str, mx.array], float]]) -> dict[str, _Experts]:
    """Return A and B of each expert's matrices, by the layers that have all experts in mlx-lm."""
    found: dict[str, _Experts] = {}
    for name, (weights, scale) in layers.items():
        if match := _EXPERT.match(name):
            matrix = _MATRICES.get(match["matrix"], match["matrix"])
            experts = found.setdefault(f"{match['block']}.switch_mlp.{matrix}", {})
            experts[int(match["number"])] = weights["lora_a"].T, weights["lora_b"].T * scale
    return found


def _of_all_experts(
    model: Any,
    adapter: Adapter,
    name: str,
    weights: Mapping[str, mx.array],
    modules: Mapping[str, Any],
) -> list[tuple[str, Part]]:
    """Return an adapter's parts for a matrix that has all experts of a layer.

    PEFT has A with the shape (experts · rank, inputs), and B with (outputs, rank · experts). Gates
    and values are one matrix in transformers, and two layers in mlx-lm.
    """
    match = _ALL_EXPERTS.match(name)
    assert match is not None
    assert adapter.peft is not None
    (layer,) = _own_paths(model, match["layer"], modules)
    kinds = (SwitchLinear, QuantizedSwitchLinear)
    paths = {
        path.rpartition(".")[2]: path
        for path, module in modules.items()
        if path.startswith(f"{layer}.") and type(module) in kinds
    }
    if not {"gate_proj", "up_proj", "down_proj"} <= paths.keys():
        raise adapter.rejected(
            f"target_parameters names {shown(name)}, which MLX has not as layers"
        )
    gates = modules[paths["gate_proj"]]
    count, (hidden, inner) = gates.weight.shape[0], sizes_of(gates)
    first, second = weights["lora_a"].T, weights["lora_b"].T
    rank, sizes = first.shape[0] // count, (first.shape[1], second.shape[0])
    targets = {(hidden, 2 * inner): "gate_up_proj", (inner, hidden): "down_proj"}
    if first.shape[0] % count or sizes not in targets:
        raise adapter.rejected(
            f"target_parameters names {shown(name)}, whose A and B have shapes {first.shape} and"
            f" {second.shape}: it was made for another model"
        )
    target = targets[sizes]
    first = first.reshape(count, rank, -1)
    second = second.reshape(-1, rank, count).transpose(2, 0, 1)
    if target == "down_proj":
        divided = {"down_proj": second}
    elif getattr(model, "model_type", "") == "gpt_oss":
        divided = {"gate_proj": second[:, ::2], "up_proj": second[:, 1::2]}
    else:
        divided = dict(zip(("gate_proj", "up_proj"), second.split(2, axis=1), strict=True))
    named = f"{match['layer']}.{match['block'] or ''}experts.{target}"
    scale = adapter.scale * adapter.peft.scale(named, rank)
    return [
        (paths[leaf], Part(adapter, {"lora_a": first, "lora_b": part}, scale))
        for leaf, part in divided.items()
    ]


def _stacked(experts: _Experts, base: Any) -> dict[str, mx.array]:
    """Return the weights of a layer with all experts, 0 for experts that are not adapted."""
    rank = max(first.shape[0] for first, _ in experts.values())
    inputs, outputs = next((first.shape[1], second.shape[0]) for first, second in experts.values())
    nothing = mx.zeros((0, inputs)), mx.zeros((outputs, 0))
    pairs = [experts.get(number, nothing) for number in range(base.weight.shape[0])]
    return {
        "lora_a": mx.stack([mx.pad(a, [(0, rank - a.shape[0]), (0, 0)]) for a, _ in pairs]),
        "lora_b": mx.stack([mx.pad(b, [(0, 0), (0, rank - b.shape[1])]) for _, b in pairs]),
    }


def _saved_whole(
    model: Any, tensors: Mapping[str, mx.array], modules: Mapping[str, Any]
) -> dict[str, mx.array]:
    """Return the weights that a PEFT adapter replaces, by the model's names."""
    found = {}
    for tensor, value in tensors.items():
        if not (part_of(tensor) or ".token_adapter." in tensor or tensor.endswith(AS_IT_WAS)):
            layer, _, leaf = whole_name(tensor).rpartition(".")
            paths = _own_paths(model, layer, modules)
            for path, part in zip(paths, mx.split(value, len(paths)) if paths else (), strict=True):
                found[f"{path}.{leaf}"] = part
    return found


def _with_rows(model: Any, adapter: Adapter, modules: Mapping[str, Any]) -> dict[str, mx.array]:
    """Return the weights of embeddings and heads with the rows that a PEFT adapter replaces."""
    assert adapter.peft is not None
    found = {}
    for tensor, rows in _read(adapter).items():
        if (replaced := rows_of(tensor, adapter.peft)) is None:
            continue
        layer, tokens = replaced
        (path,) = _own_paths(model, layer, modules)
        base = layer_at(path, modules, adapter)
        if len(tokens) != len(rows) or any(not 0 <= at < len(base.weight) for at in tokens):
            raise adapter.rejected(
                f"trainable_token_indices names {len(tokens)} tokens of {shown(layer)}, but there"
                f" are {len(rows)} rows, and the model has {len(base.weight)}"
            )
        new = {"weight": rows}
        if "scales" in base:
            form = {name: getattr(base, name) for name in ("group_size", "bits", "mode")}
            names = ("weight", "scales", "biases")
            new = dict(zip(names, mx.quantize(rows, **form), strict=False))
        for name, values in new.items():
            whole = mx.array(base[name])
            whole[mx.array(tokens)] = values.astype(whole.dtype)
            found[f"{path}.{name}"] = whole
    return found


def _own_paths(model: Any, path: str, modules: Mapping[str, Any]) -> Sequence[str]:
    """Return the model's paths for a layer that an adapter names.

    The beginning of a path differs between transformers and mlx-lm. The networks of this project
    translate whole paths, may divide a layer into several, and may leave one out.
    """
    if hasattr(model, "own_paths"):
        paths: Sequence[str] = model.own_paths(path)
        return paths
    inner = _OUTER.sub("", path)
    possible = [path, *(f"{outer}{inner}" for outer in ("", "model.", "language_model.model."))]
    found = next((candidate for candidate in possible if candidate in modules), path)
    return [own_path(found, modules)]


def _divided(whole: Mapping[str, mx.array], count: int) -> list[dict[str, mx.array]]:
    """Divide an adapter's weights among `count` layers with equal numbers of outputs."""
    if count <= 1:
        return [dict(whole)] * count
    divided = {
        name: [value] * count if name == "lora_a" else mx.split(value, count, axis=-1)
        for name, value in whole.items()
    }
    return [{name: parts[at] for name, parts in divided.items()} for at in range(count)]


def _replace(model: Any, adapter: Adapter, tensors: dict[str, mx.array]) -> None:
    """Replace weights of the model by the weights of a full fine-tune, cast to the model's type."""
    own: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for name, weight in tensors.items():
        if name not in own:
            raise adapter.rejected(
                f"the model has no weight {shown(name)}{did_you_mean(name, own)}"
            )
        if weight.shape != own[name].shape:
            packed = not mx.issubdtype(own[name].dtype, mx.floating)
            raise adapter.rejected(
                f"{shown(name)} has shape {weight.shape}, but"
                f" {'the quantised model' if packed else 'the model'} has {own[name].shape}: it was"
                " made for another model"
            )
    model.load_weights(
        [(name, weight.astype(own[name].dtype)) for name, weight in tensors.items()], strict=False
    )


def layer_at(path: str, modules: Mapping[str, Any], adapter: Adapter) -> Any:
    """Return the layer that an adapter changes. Raises ModelRejected if there is none."""
    if path not in modules:
        hint = did_you_mean(path, modules)
        raise adapter.rejected(f"the model has no layer {shown(path)}{hint}")
    return modules[path]


def _adapted(path: str, modules: dict[str, Any], parts: list[Part]) -> Any:
    adapter = parts[0].adapter
    base = layer_at(path, modules, adapter)
    if adapter.peft and adapter.kind == "dora" and _LORA.get(type(base)) is LoRAEmbedding:
        return _embedding_with(path, parts[0], base)
    kind = (_LORA if adapter.kind == "lora" else _DORA).get(type(base))
    if kind is None:
        raise adapter.rejected(
            f"layer {shown(path)} is a {type(base).__name__}, to which no {adapter.kind} adapter"
            " can be applied"
        )
    for part in parts:
        require_shapes(path, part, base)
        if "bias" in part.weights:
            base.bias = part.scale * part.weights["bias"] + base.get("bias", 0.0)
    weights, rank, scale = parts[0].weights, parts[0].rank, parts[0].scale
    if len(parts) > 1:  # of LoRA
        first = [part.weights["lora_a"] for part in parts]
        second = [part.weights["lora_b"] * part.scale for part in parts]
        rank, scale = sum(part.rank for part in parts), 1.0
        weights = {
            "lora_a": mx.concatenate(first, axis=1),
            "lora_b": mx.concatenate(second, axis=2 if kind is LoRASwitchLinear else 0),
        }
    layer = kind.from_base(base, r=rank, scale=scale)
    for name, weight in weights.items():
        if name != "bias":
            layer[name] = weight
    return layer


def _embedding_with(path: str, part: Part, base: Any) -> Any:
    """Return an embedding with DoRA of PEFT, which sets the length of columns, not of rows."""
    require_shapes(path, part, base)
    product = part.weights["lora_a"] @ part.weights["lora_b"]
    whole = dense_weight(base, mx.float32) + part.scale * product
    layer = Embedding(*whole.shape)
    layer.weight = whole * (part.weights["m"] / mx.linalg.norm(whole, axis=0))
    return layer


def require_shapes(path: str, part: Part, base: Any) -> None:
    """Raise ModelRejected if an adapter was made for a layer of another shape."""
    shapes = _shapes(base, columns_have_lengths=part.adapter.peft is not None)
    for name, weight in part.weights.items():
        if name not in shapes:
            raise part.adapter.rejected(f"layer {shown(path)} cannot have the {name} of its lora_b")
        expected = tuple(size or part.rank for size in shapes[name])
        if weight.shape != expected:
            raise part.adapter.rejected(
                f"{name} of layer {shown(path)} has shape {weight.shape}, but the model needs"
                f" {expected}: it was made for another model"
            )


def sizes_of(base: Any) -> tuple[int, int]:
    """Return how many inputs and outputs a layer has, which may be quantised."""
    weight = getattr(base, "linear", base)
    columns = weight.scales.shape[-1] * weight.group_size if "scales" in weight else 0
    return columns or weight.weight.shape[-1], weight.weight.shape[-2]


def _shapes(base: Any, *, columns_have_lengths: bool) -> dict[str, Shape]:
    """Return the shapes of an adapter's weights for a layer, with 0 in place of the rank.

    columns_have_lengths: whether DoRA of an embedding sets lengths of columns, not of rows.
    """
    experts, (columns, rows) = base.weight.shape[:-2], sizes_of(base)
    kind = _LORA[type(base)]
    if kind is LoRAEmbedding:
        lengths = columns if columns_have_lengths else rows
        return {"lora_a": (rows, 0), "lora_b": (0, columns), "m": (lengths,)}
    if kind is LoRASwitchLinear:
        return {"lora_a": (*experts, 0, columns), "lora_b": (*experts, rows, 0)}
    return {"lora_a": (columns, 0), "lora_b": (0, rows), "m": (rows,), "bias": (rows,)}
