"""Reads and applies the Dense and LayerNorm steps of sentence-transformers checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.engine.embedding.networks import FUNCTIONS, function_of, normalized
from backend.engine.embedding.sentence_files import SentenceFiles
from backend.engine.errors import Unusable
from common.wording import shown


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A Dense or LayerNorm step as its checkpoint describes it.

    folder: the folder of the layer's weights in the checkpoint.
    inputs, outputs: lengths of the input and output vectors.
    activation: a key of `networks.FUNCTIONS`; "" for a LayerNorm.
    of_tokens: whether it is applied to the vectors of tokens, before pooling.
    adds: whether its input is added to its output.
    normalizes: whether its input is scaled to length 1 first.
    """

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str
    of_tokens: bool = False
    adds: bool = False
    normalizes: bool = False


def dense_layers(files: SentenceFiles, config: Mapping[str, Any]) -> tuple[DenseLayer, ...]:
    """Return a checkpoint's Dense layers. Raises Unusable.

    Conversions of EmbeddingGemma may have the weights of its two layers without a description.
    """
    usual: list[DenseLayer] = []
    if config["model_type"] == "gemma3_text":
        sizes = (config["hidden_size"], 4 * config["hidden_size"])
        usual = [
            DenseLayer("2_Dense", *sizes, bias=False, activation="Identity"),
            DenseLayer("3_Dense", *sizes[::-1], bias=False, activation="Identity"),
        ]
    if (steps := files.steps) is None:
        return tuple(usual)
    found: list[DenseLayer] = []
    pooled = normalized = False
    late = files.late_interaction
    for kind, folder in steps:
        pooled = pooled or kind == "Pooling"
        normalized = normalized or kind == "Normalize"
        if kind not in ("Dense", "LayerNorm"):
            continue
        path = files.path / folder
        if (path / "pytorch_model.bin").exists() and not (path / "model.safetensors").exists():
            raise Unusable(
                f"the weights of its step in {shown(folder)} are in pytorch_model.bin, which"
                " needs PyTorch; use a version that has model.safetensors there"
            )
        undescribed = files.value(f"{folder}/config.json") is None and len(found) < len(usual)
        layer = usual[len(found)] if undescribed else _layer(files, kind, folder)
        layer = replace(layer, of_tokens=layer.of_tokens or late)
        if layer.of_tokens == pooled:
            raise Unusable(
                f"the step in {shown(folder)} comes"
                f" {'after' if pooled else 'before'} pooling, where its input is missing"
            )
        found.append(replace(layer, normalizes=normalized))
        normalized = False
    return tuple(found)


def _layer(files: SentenceFiles, kind: str, folder: str) -> DenseLayer:
    """Return the layer that a folder's config.json describes. Raises Unusable."""
    stated = files.object(f"{folder}/config.json")
    if kind == "LayerNorm":
        size = stated.get("dimension")
        if type(size) is not int or size < 1:
            raise Unusable(f"the config.json in {shown(folder)} does not state dimension")
        return DenseLayer(folder, size, size, bias=True, activation="")
    activation = str(stated.get("activation_function", "Identity")).rpartition(".")[2]
    function_of(activation, f"the Dense layer in {shown(folder)}")
    source = stated.get("module_input_name", "sentence_embedding")
    inputs, outputs = stated.get("in_features"), stated.get("out_features")
    if type(inputs) is not int or type(outputs) is not int or min(inputs, outputs) < 1:
        raise Unusable(
            f"the config.json in {shown(folder)} does not state in_features and out_features"
        )
    adds, of_tokens = stated.get("use_residual") is True, source == "token_embeddings"
    result = stated.get("module_output_name")
    scores = result == "scores" and outputs == 1
    if (
        not (of_tokens or source == "sentence_embedding")
        or not (result in (source, None) or scores)
        or (adds and inputs != outputs)
    ):
        raise Unusable(
            f"the Dense layer in {shown(folder)} reads or returns other vectors than those of the"
            " tokens or of the text, or several scores, which is not supported"
        )
    bias = stated.get("bias", True) is True
    return DenseLayer(folder, inputs, outputs, bias, activation, of_tokens, adds)


def with_dense(network: Any, layers: Sequence[DenseLayer], path: Path) -> Any:
    """Return a subclass of a network that also loads Dense layers, as its attribute `dense`.

    network: the class of the network.
    layers: the Dense layers, in order.
    path: the checkpoint's folder.
    """
    from mlx.nn.layers.linear import Linear
    from mlx.nn.layers.normalization import LayerNorm

    def begin(model: Any, config: Any) -> None:
        network.__init__(model, config)
        model.dense = [
            Linear(layer.inputs, layer.outputs, layer.bias)
            if layer.activation
            else LayerNorm(layer.inputs)
            for layer in layers
        ]

    def sanitize(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        # Conversions to MLX have the weights of Dense layers among their other weights.
        found = {name: value for name, value in weights.items() if name.startswith("dense.")}
        rest = {name: value for name, value in weights.items() if name not in found}
        for at, layer in enumerate(layers):
            if (file := path / layer.folder / "model.safetensors").exists():
                stored: Any = mx.load(str(file))
                found |= {
                    f"dense.{at}.{name.removeprefix('linear.').removeprefix('norm.')}": value
                    for name, value in stored.items()
                }
        loaded: dict[str, mx.array] = network.sanitize(model, rest)
        return loaded | found

    return type(network.__name__, (network,), {"__init__": begin, "sanitize": sanitize})


def applied(
    layers: Sequence[DenseLayer], model: Any, *, of_tokens: bool
) -> list[Callable[[mx.array], mx.array]]:
    """Return a function for each layer, which applies the layer to vectors.

    model: an instance of `with_dense`, whose matrices may be quantised.
    of_tokens: whether to return the layers before pooling; otherwise those after it.
    """

    def call(layer: DenseLayer, matrix: Any, vectors: mx.array) -> mx.array:
        vectors = normalized(vectors) if layer.normalizes else vectors
        result = FUNCTIONS[layer.activation or "Identity"](matrix(vectors))
        return result + vectors if layer.adds else result

    pairs = zip(layers, model.dense if layers else (), strict=True)
    return [partial(call, *pair) for pair in pairs if pair[0].of_tokens == of_tokens]
