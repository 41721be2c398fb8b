"""Opens a checkpoint as an encoder of this project, or as a text model of mlx-lm or mlx-vlm.

A text model of mlx-lm embeds without its projection to logits, whose weights many embedding
checkpoints lack. Its weights may have the names that sentence-transformers writes, which begin
inside the model. The Dense and LayerNorm steps of sentence-transformers are loaded with a network.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx

from backend.engine.embedding import encoder
from backend.engine.embedding.encoder_shape import shape_of
from backend.engine.embedding.kind import (
    OF_MLX_LM,
    OURS,
    is_jina_v4,
    is_static,
    labels_of,
    module_of,
)
from backend.engine.embedding.networks import FUNCTIONS, function_of, normalized
from backend.engine.embedding.sentence_files import SentenceFiles
from backend.engine.errors import Unusable
from backend.engine.loading.earlier_fields import earlier_fields
from backend.engine.loading.weights import mlx_lm_classes
from backend.engine.patching import patch
from common.model_kind import ModelKind
from common.wording import shown

Weights = dict[str, mx.array]
# Fields to add to config.json, and a function that returns the classes of model and arguments.
_Source = tuple[dict[str, Any], Callable[[dict[str, Any]], tuple[Any, Any]]]
_WHOLE = ("model.", "language_model.", "transformer.", "backbone.")
_HEADS = ("lm_head.", "score.")
_JINA_V4_LONGEST = 32768  # tokens; its code truncates longer texts
_JINA_V4_TEXT = re.compile(
    r"^(?:model\.)?(?:language_model\.)?(?:model\.)?((?:embed_tokens|layers|norm)\..+)$"
)
# Model type → the layers of the MLP before and after its GELU, where mlx-lm computes another GELU
# than the reference, and the GELU of the reference.
_GELUS: Mapping[str, tuple[tuple[str, ...], str, Callable[[mx.array], mx.array]]] = {
    "gemma": (("gate_proj", "up_proj"), "down_proj", gelu_approx),
    "starcoder2": (("c_fc",), "c_proj", gelu_approx),
}


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
    """Return a subclass of a network that also loads Dense layers, as its attribute `dense`."""
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


def open_network(
    config: Mapping[str, Any], kind: ModelKind, dense: Sequence[DenseLayer], path: Path
) -> tuple[Any, dict[str, Any]]:
    """Return a network with lazy weights, and config.json under the names that this project reads.

    Raises Unusable, and ValueError for a field that mlx-vlm cannot express.
    """
    from mlx_lm.utils import load_model

    module = module_of(kind, config)
    if is_static(config):
        stated = encoder.fields_of_static(path)
        sizes = stated["vocab_size"], stated["hidden_size"]
        classes = _of_shape(encoder.StaticModel, sizes)
    elif module == OURS:
        stated, classes = _of_ours(config, kind, scores=not dense)
    elif module:
        stated, classes = _of_vlm(module, config)
    else:
        stated, classes = _of_mlx_lm(config, scores=kind is ModelKind.RERANK and not dense)

    def with_layers(config: dict[str, Any]) -> tuple[Any, Any]:
        network, arguments = classes(config)
        return with_dense(network, dense, path), arguments

    # model_file names code in the checkpoint, which is not run.
    stated = {"model_file": None, **stated}
    model, read = load_model(path, lazy=True, model_config=stated, get_model_classes=with_layers)
    mend_text_model(model, read)
    return model, read | {"model_type": config["model_type"]}


def _of_ours(config: Mapping[str, Any], kind: ModelKind, *, scores: bool) -> _Source:
    """Open an encoder of this project.

    scores: whether a reranker has a head; otherwise its Dense layers compute the score.
    """
    labels = kind is ModelKind.TOKEN_CLASSIFY
    outputs = len(labels_of(config)) if labels else int(kind is ModelKind.RERANK and scores)
    shape = replace(shape_of(config), outputs=outputs, labels=labels)
    stated = {
        "max_position_embeddings": shape.longest,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
    }
    return stated, _of_shape(encoder.Model, shape)


def _of_shape(network: Any, shape: Any) -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    """Return a function for mlx-lm that returns a network and the class of its only argument."""
    arguments = type("Arguments", (), {"from_dict": staticmethod(lambda _: shape)})
    return lambda _: (network, arguments)


def _of_vlm(module: str, config: Mapping[str, Any]) -> _Source:
    network = importlib.import_module(f"mlx_vlm.models.{module}")
    known = frozenset(field.name for field in fields(network.ModelConfig))
    stated = earlier_fields(config, known)
    if labels := labels_of(config):
        stated["num_labels"] = len(labels)
    return stated, lambda _: (network.Model, network.ModelConfig)


def _of_mlx_lm(config: Mapping[str, Any], *, scores: bool) -> _Source:
    """Open a text model of mlx-lm without its projection.

    scores: whether the model has a layer `score` instead.
    """
    of_jina = is_jina_v4(config)
    other = OF_MLX_LM.get(config["model_type"])
    stated = _of_jina_v4(config) if of_jina else {"model_type": other} if other else {}

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        network, arguments = mlx_lm_classes(config)
        prepare = _text_of_jina_v4 if of_jina else dict
        return _without_head(network, prepare, scores), arguments

    return stated, classes


def _without_head(network: Any, prepare: Callable[[Weights], Weights], ranks: bool) -> Any:
    """Return a subclass of a network of mlx-lm that has no projection to logits.

    prepare: changes the checkpoint's weights first.
    ranks: whether the subclass has a layer `score`.
    """
    from mlx.nn.layers.linear import Linear

    def begin(model: Any, arguments: Any) -> None:
        network.__init__(model, arguments)
        if ranks:
            stated = getattr(arguments, "text_config", None) or vars(arguments)
            size = int(stated.get("hidden_size") or stated["n_embd"])
            model.score = Linear(size, 1, bias=False)

    def sanitize(model: Any, weights: Weights) -> Weights:
        heads = {name: value for name, value in weights.items() if name.startswith(_HEADS)}
        weights = prepare({name: value for name, value in weights.items() if name not in heads})
        if not any(name.startswith(_WHOLE) for name in weights):
            weights = {f"model.{name}": value for name, value in weights.items()}
        if hasattr(network, "sanitize"):
            weights = network.sanitize(model, weights)
        getattr(model, "language_model", model).pop("lm_head", None)
        weights = {name: value for name, value in weights.items() if "lm_head." not in name}
        scores = {name: value for name, value in heads.items() if ranks and "score." in name}
        return weights | scores

    return type(network.__name__, (network,), {"__init__": begin, "sanitize": sanitize})


def mend_text_model(model: Any, config: Mapping[str, Any]) -> None:
    """Compute as the reference does where mlx-lm differs: the GELU, and GLM's partial rotation."""
    if config["model_type"] == "glm":
        rope = config.get("rope_parameters") or {}
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5))
        for layer in model.layers:
            layer.self_attn.rope.dims = int(layer.self_attn.head_dim * part)
    if config["model_type"] not in _GELUS:
        return
    before, after, gelu = _GELUS[config["model_type"]]

    def call(_: Any, mlp: Any, states: mx.array) -> Any:
        first, *others = (mlp[name](states) for name in before)
        return mlp[after](gelu(first) * others[0] if others else gelu(first))

    for layer in model.layers:
        patch(layer.mlp, call)


def _of_jina_v4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text part of jina-embeddings-v4, Qwen2.5-VL's language model.

    mlx-lm's Qwen2 computes it, because the three positions of a text's token are the same number.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise Unusable("its config.json has no text_config")
    stated = text | earlier_fields(text, ("rope_theta",)) | {"model_type": "qwen2"}
    stated |= {"rope_scaling": None, "rope_parameters": None}  # they number positions in images
    longest = min(_JINA_V4_LONGEST, int(text["max_position_embeddings"]))
    return stated | {"max_position_embeddings": longest}


def _text_of_jina_v4(weights: Weights) -> Weights:
    found = ((_JINA_V4_TEXT.match(name), value) for name, value in weights.items())
    return {match[1]: value for match, value in found if match}
