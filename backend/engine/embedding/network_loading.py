"""Opens a checkpoint as an encoder of this project, or as a text model of mlx-lm or mlx-vlm.

A text model of mlx-lm embeds without its projection to logits, whose weights many embedding
checkpoints lack. Its weights may have the names that sentence-transformers writes, which begin
inside the model.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx

from backend.engine.embedding import encoder, static_embedding
from backend.engine.embedding.dense_layers import DenseLayer, with_dense
from backend.engine.embedding.encoder_shape import shape_of
from backend.engine.embedding.kind import OF_MLX_LM, OURS, is_static, labels_of, module_of
from backend.engine.embedding.task_adapters import is_jina_v4
from backend.engine.errors import Unusable
from backend.engine.loading.earlier_fields import earlier_fields
from backend.engine.loading.weights import mlx_lm_classes
from backend.engine.patching import patch
from common.model_kind import ModelKind

Weights = dict[str, mx.array]
# Fields to add to config.json, and a function that returns the classes of model and arguments.
_Source = tuple[dict[str, Any], Callable[[dict[str, Any]], tuple[Any, Any]]]
_WHOLE = ("model.", "language_model.", "transformer.", "backbone.")
_HEADS = ("lm_head.", "score.")
_JINA_V4_LONGEST = 32768  # tokens; its code truncates longer texts
_JINA_V4_TEXT = re.compile(
    r"^(?:model\.)?(?:language_model\.)?(?:model\.)?((?:embed_tokens|layers|norm)\..+)$"
)


def open_network(
    config: Mapping[str, Any], kind: ModelKind, dense: Sequence[DenseLayer], path: Path
) -> tuple[Any, dict[str, Any]]:
    """Return a network with lazy weights, and config.json under the names that this project reads.

    dense: the Dense layers to load with the network.
    path: the checkpoint's folder.

    Raises Unusable, and ValueError for a field that mlx-vlm cannot express.
    """
    from mlx_lm.utils import load_model

    module = module_of(kind, config)
    if is_static(config):
        stated = static_embedding.fields_of(path)
        sizes = stated["vocab_size"], stated["hidden_size"]
        classes = _planned(static_embedding.Model, sizes)
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
    of_tokens = kind is ModelKind.TOKEN_CLASSIFY
    outputs = int(kind is ModelKind.RERANK and scores)
    outputs = len(labels_of(config)) if of_tokens else outputs
    shape = shape_of(config)
    plan = encoder.Plan(shape, outputs, of_tokens)
    stated = {
        "max_position_embeddings": shape.longest,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
    }
    return stated, _planned(encoder.Model, plan)


def _planned(network: Any, plan: Any) -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    """Return a function for mlx-lm that returns a network and the class of its only argument."""
    arguments = type("Arguments", (), {"from_dict": staticmethod(lambda _: plan)})
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


# Model type → the layers of the MLP before and after its GELU, where mlx-lm computes another GELU
# than the reference, and the GELU of the reference.
_GELUS: Mapping[str, tuple[tuple[str, ...], str, Callable[[mx.array], mx.array]]] = {
    "gemma": (("gate_proj", "up_proj"), "down_proj", gelu_approx),
    "starcoder2": (("c_fc",), "c_proj", gelu_approx),
}


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
    """Return the weights of the language model, without weights for images or multi-vectors."""
    found = ((_JINA_V4_TEXT.match(name), value) for name, value in weights.items())
    return {match[1]: value for match, value in found if match}
