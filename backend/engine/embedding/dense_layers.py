"""The Dense layers of a sentence-transformers checkpoint, which follow its pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.engine.errors import ModelRejected
from common.wording import shown

_ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda vectors: vectors,
    "Tanh": mx.tanh,
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """folder: the part of the checkpoint that has its weights. inputs, outputs: their sizes."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


def dense_layer(folder: str, stated: Mapping[str, Any], name: str) -> DenseLayer:
    """The layer that a folder's config.json describes. Raises ModelRejected."""
    activation = str(stated.get("activation_function", "Identity")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ModelRejected.because(
            name,
            f"the Dense layer in {shown(folder)} has the activation {shown(activation)}, but only"
            f" {' and '.join(_ACTIVATIONS)} are supported",
        )
    source = stated.get("module_input_name", "sentence_embedding")
    if source != "sentence_embedding" or stated.get("use_residual"):
        raise ModelRejected.because(
            name,
            f"the Dense layer in {shown(folder)} takes or gives more than the pooled vector, which"
            " is not supported",
        )
    inputs, outputs = stated.get("in_features"), stated.get("out_features")
    if type(inputs) is not int or type(outputs) is not int or min(inputs, outputs) < 1:
        raise ModelRejected.because(
            name, f"the config.json in {shown(folder)} does not state in_features and out_features"
        )
    return DenseLayer(folder, inputs, outputs, stated.get("bias", True) is True, activation)


def with_dense(own: Any, layers: Sequence[DenseLayer], path: Path) -> Any:
    """Return a subclass of a network that loads these layers as `dense`.

    path: the checkpoint's folder.
    """
    from mlx.nn.layers.linear import Linear

    folders = tuple(f"{layer.folder}." for layer in layers)

    def begin(model: Any, config: Any) -> None:
        own.__init__(model, config)
        model.dense = [Linear(one.inputs, one.outputs, one.bias) for one in layers]

    def sanitize(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        found, rest = {}, {}
        for name, value in weights.items():
            if name.startswith("dense."):  # of a conversion to MLX
                found[name] = value
            elif not name.startswith(folders):  # mlx-vlm reads these files too
                rest[name] = value
        for at, layer in enumerate(layers):
            if (file := path / layer.folder / "model.safetensors").exists():
                held: Any = mx.load(str(file))
                found |= {
                    f"dense.{at}.{name.removeprefix('linear.')}": value
                    for name, value in held.items()
                }
        loaded: dict[str, mx.array] = own.sanitize(model, rest)
        return loaded | found

    return type(own.__name__, (own,), {"__init__": begin, "sanitize": sanitize})


def applied(layers: Sequence[DenseLayer], model: Any) -> list[Callable[[mx.array], mx.array]]:
    """What each layer does to a vector. model: has their matrices, which may be quantised."""

    def call(matrix: Any, activation: Callable[[mx.array], mx.array]) -> Any:
        return lambda vectors: activation(matrix(vectors))

    named = [_ACTIVATIONS[layer.activation] for layer in layers]
    return [call(*one) for one in zip(model.dense if layers else (), named, strict=True)]
