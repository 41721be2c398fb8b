"""Replaces quantised layers by dense layers, while the weights are still lazy.

The weights are then unpacked slice by slice while the model is evaluated, and each packed weight is
released as soon as its dense weight exists.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_unflatten

# mlx-lm and mlx-vlm each have a copy of these layers, under the same names. A package that is not
# imported cannot have built the model.
_COPIED = (
    ("switch_layers", "QuantizedSwitchLinear", "SwitchLinear"),
    ("mla", "QuantizedMultiLinear", "MultiLinear"),
)


def quantized_layers(model: Any) -> dict[str, Any]:
    """Return the layers that can be made dense, by path, including layers inside adapters.

    Layers of derived classes are left out, because they may compute something else.
    """
    kinds = _dense_kinds()
    return {path: layer for path, layer in model.named_modules() if type(layer) in kinds}


def unread_layer(model: Any) -> str | None:
    """Return the path of a dense layer whose weights are whole numbers; None if there is none.

    Such weights are quantised by a method whose scales the model has no parameters for. MLX reads
    FP8 weights, for example, as whole numbers, and would compute with these numbers.
    """
    dense = set(_dense_kinds().values())
    for path, layer in model.named_modules():
        if type(layer) in dense and not mx.issubdtype(layer.weight.dtype, mx.floating):
            return str(path)
    return None


def dense_growth(layers: dict[str, Any], dtype: mx.Dtype) -> int:
    """Return by how many bytes the layers grow when they become dense."""
    growth = 0
    for layer in {id(layer): layer for layer in layers.values()}.values():
        packed = (layer.weight, layer.scales, layer.get("biases"), layer.get("global_scale"))
        growth += layer.scales.size * layer.group_size * dtype.size
        growth -= sum(part.nbytes for part in packed if part is not None)
    return growth


def make_dense(model: Any, layers: dict[str, Any], dtype: mx.Dtype) -> None:
    """Replace layers by dense layers. A layer that has several paths stays one layer."""
    kinds = _dense_kinds()
    dense: dict[int, Any] = {}
    for layer in layers.values():
        if id(layer) not in dense:
            dense[id(layer)] = _dense(layer, kinds[type(layer)], dtype)
    model.update_modules(
        tree_unflatten([(path, dense[id(layer)]) for path, layer in layers.items()])
    )


def _dense(layer: Any, kind: Any, dtype: mx.Dtype) -> Any:
    scale = layer.get("global_scale")
    if scale is None:
        weight = _unpacked(layer, layer.weight, layer.scales, dtype)
    else:  # each expert has a scale, and MLX accepts only one scale in a call
        experts = zip(layer.weight, layer.scales, scale, strict=True)
        weight = mx.stack([_unpacked(layer, w, s, dtype, g) for w, s, g in experts])
    made = kind(*[1] * weight.ndim)
    made.weight = weight
    if "bias" in layer:
        made.bias = layer.bias
    else:
        made.pop("bias", None)
    return made


def _unpacked(
    layer: Any, weight: mx.array, scales: mx.array, dtype: mx.Dtype, scale: mx.array | None = None
) -> mx.array:
    dense = mx.dequantize(
        weight,
        scales,
        layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        global_scale=scale,
        dtype=dtype,
    )
    return dense.astype(dtype)  # with a global scale MLX returns float32


def _dense_kinds() -> dict[type[Any], type[Any]]:
    kinds: dict[type[Any], type[Any]] = {QuantizedLinear: Linear, QuantizedEmbedding: Embedding}
    for package in ("mlx_lm", "mlx_vlm"):
        for file, quantized, dense in _COPIED:
            if module := sys.modules.get(f"{package}.models.{file}"):
                kinds[getattr(module, quantized)] = getattr(module, dense)
    return kinds


def dense_weight(layer: Any, dtype: mx.Dtype) -> mx.array:
    """Return the weights of a linear layer, which may be quantised."""
    if "scales" in layer:
        return _unpacked(layer, layer.weight, layer.scales, dtype, layer.get("global_scale"))
    weight: mx.array = layer.weight
    return weight.astype(dtype)
