"""Decides the kind of a checkpoint from its configuration, and finds the adapters of its tasks.

The kind is decided before a download and before any weight is read, so this module does not need
MLX. The user's option `type` takes precedence over the files. A load request's flags are checked
against the result.

Jina embeddings v3 has the adapters of its tasks stacked in its weights, and names the tasks in
config.json. Its conversion for transformers 5 has a folder in PEFT's format for each task. Jina
embeddings v4 has one such folder for all tasks, and is always used with a task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from backend.engine.embedding.encoder_shape import FAMILIES as ENCODERS
from backend.engine.embedding.encoder_shape import TYPES, family_of, shape_of
from backend.engine.errors import InvalidRequest, Unusable
from backend.engine.load_request import AdapterRequest
from backend.engine.loading.adapters import CONFIG, Adapter, inspect_adapter
from backend.engine.loading.architectures import is_multimodal, model_types
from backend.engine.loading.peft import read_peft
from common.field_names import named
from common.model_kind import SPEECH_TYPES, ModelKind
from common.wording import shown

# The value of `module_of` for the encoders of this project.
OURS = "encoder"
# `model_type` in config.json → the module of mlx-vlm that computes it.
_OF_VLM = {
    "embedding_gemma2": "embedding_gemma2",
    "lfm2": "lfm2_embedding",
    "openai_privacy_filter": "openai_privacy_filter",
}
# Model types that mlx-lm computes under other names → these names.
OF_MLX_LM = {"llama_bidirec": "llama", "eurobert": "llama", "qwen3_5_text": "qwen3_5"}
# Model types of embedders whose tokens attend in both directions. Other models of the type
# ministral3 have transformers' own architectures.
_BOTH_WAYS_TYPES = ("llama_bidirec", "ministral3", "eurobert")
# Text models whose rerankers have heads that are not computed, and models of which mlx-lm computes
# only logits.
_OTHER_HEADS = ("llama_bidirec", "eurobert")
ONLY_LOGITS = ("gpt_neox", "olmo", "lille-130m")
_OWN_MINISTRAL = frozenset(
    f"Ministral3{part}" for part in ("Model", "ForCausalLM", "ForSequenceClassification")
)
# All encoders of this project score pairs, and all but these label tokens.
_NOT_LABELLING = {"nomic_bert", "new", "gte", "jina_embeddings_v3"}
# Supported values of `model_type` in config.json, besides the text models of mlx-lm.
FAMILIES: Mapping[ModelKind, frozenset[str]] = {
    ModelKind.EMBEDDING: frozenset({
        *TYPES, "gemma3_text", "embedding_gemma2", "lfm2", "ministral3",
        "llama_bidirec", "eurobert", "model2vec",
    }),
    ModelKind.RERANK: frozenset(TYPES),
    ModelKind.TOKEN_CLASSIFY: frozenset({*TYPES, "openai_privacy_filter"}) - _NOT_LABELLING,
    ModelKind.TRANSCRIBE: frozenset(SPEECH_TYPES),
}  # fmt: skip
# The kinds that text models of mlx-lm serve, by pooling or by the token with which they answer.
_OF_TEXT_MODELS = (ModelKind.EMBEDDING, ModelKind.RERANK)
_BOTH_WAYS = "modeling_qwen.Qwen2Model"
# Rerankers whose prompt is known even if their files do not state it. Only the load request
# distinguishes them from models that generate text.
ANSWERING_RERANKERS = frozenset({"qwen3", "gemma"})


def with_flags(
    kind: ModelKind, config: Mapping[str, Any], *, embeddings: bool, reranking: bool
) -> ModelKind:
    """Return the kind of a model, given the load request's flags. Raises InvalidRequest."""
    if reranking and kind is ModelKind.TEXT and config["model_type"] in ANSWERING_RERANKERS:
        kind = ModelKind.RERANK
    if reranking and kind is not ModelKind.RERANK:
        raise InvalidRequest(
            f"Reranking is true, but the model {kind.words}: load a cross-encoder, a Qwen3"
            " reranker or bge-reranker-v2-gemma, or turn it off in the model's configuration"
        )
    if embeddings and kind not in (ModelKind.TEXT, ModelKind.EMBEDDING):
        raise InvalidRequest(
            f"{named('Embeddings')} is true, but the model {kind.words}: load an embedding model,"
            " or turn it off in the model's configuration"
        )
    return kind


def require_tasks(kind: ModelKind, config: Mapping[str, Any], task: str) -> None:
    """Raise InvalidRequest if the option `task` is set for a model without adapters for tasks."""
    has_tasks = family_of(config) == "jina" or is_jina_v4(config)
    if task and (kind is not ModelKind.EMBEDDING or not has_tasks):
        what = "has no tasks" if kind is ModelKind.EMBEDDING else kind.words
        raise InvalidRequest(
            f"task is {shown(task)}, but the model {what}: leave it empty for this model"
        )


def module_of(kind: ModelKind, config: Mapping[str, Any]) -> str:
    """Return the module of mlx-vlm that computes a model, OURS, or "" for models of mlx-lm."""
    if config["model_type"] not in FAMILIES[kind]:
        return ""
    return OURS if family_of(config) or is_static(config) else _OF_VLM.get(config["model_type"], "")


def is_static(config: Mapping[str, Any]) -> bool:
    """Return whether each token has a fixed vector (model2vec)."""
    return bool(config["model_type"] == "model2vec")


def require_family(kind: ModelKind, config: Mapping[str, Any]) -> None:
    """Raise Unusable for a model that cannot be computed, or would be computed wrongly."""
    families = FAMILIES[kind]
    model_type = config["model_type"]
    if kind is ModelKind.EMBEDDING and is_jina_v4(config):
        _require_values(config, {"single_vector_pool_strategy": "mean"}, "jina-embeddings-v4")
        return
    of_text = kind in _OF_TEXT_MODELS and is_text_model(config) and model_type not in ONLY_LOGITS
    other_head = kind is ModelKind.RERANK and model_type in _OTHER_HEADS
    generates = model_type not in families and of_text and not other_head
    if model_type not in families and not generates:
        others = ", or another text model of mlx-lm" if kind in _OF_TEXT_MODELS else ""
        raise Unusable(
            f"it {kind.words}, and its model type {shown(model_type)} is not supported: load"
            f" a model of one of the types {', '.join(sorted(families))}{others}"
        )
    if kind is ModelKind.RERANK and (not generates or has_score(config)):
        _require_one_score(config)
    if kind is ModelKind.TOKEN_CLASSIFY and not labels_of(config):
        raise Unusable("its config.json does not name the labels (id2label)")
    if family := ENCODERS.get(family_of(config)):
        _require_values(config, family.only, family.example)
        shape_of(config)
    elif generates:
        _require_values(config, {"use_sliding_window": False}, "Qwen3-Embedding-0.6B")


def is_causal(config: Mapping[str, Any]) -> bool:
    """Return whether the tokens of a text model attend only to earlier tokens.

    In the code of gte-Qwen2, which stella-en-1.5B and others name too, tokens attend to all tokens.
    """
    own = _OWN_MINISTRAL.intersection(config.get("architectures") or ())
    if config["model_type"] in _BOTH_WAYS_TYPES and not own:
        return False
    code = config.get("auto_map")
    named = str(code.get("AutoModel")) if isinstance(code, dict) else ""
    stated = config.get("is_causal")
    return stated is not False if stated is not None else not named.endswith(_BOTH_WAYS)


def is_text_model(config: Mapping[str, Any]) -> bool:
    """Return whether mlx-lm computes a model, and the model reads only text."""
    model_type = str(config["model_type"])
    return (
        OF_MLX_LM.get(model_type, model_type) in model_types()
        and not model_type.endswith("_vl")
        and not is_multimodal(dict(config))
    )


def _require_values(config: Mapping[str, Any], rules: Mapping[str, Any], example: str) -> None:
    for key, computed in rules.items():
        value = config.get(key, computed)
        if value != computed:
            raise Unusable(
                f"its {key} is {shown(value)}, but only {shown(computed)} is supported; load a"
                f" model that has that, such as {example}"
            )


def has_score(config: Mapping[str, Any]) -> bool:
    """Return whether a model was converted to return a score instead of an answer."""
    names = config.get("architectures") or ()
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def _require_one_score(config: Mapping[str, Any]) -> None:
    # transformers writes no labels if there are two, its usual number.
    usual = 2 if has_score(config) else 1
    labels = config.get("num_labels") or len(labels_of(config)) or usual
    if labels != 1:
        raise Unusable(
            f"it classifies texts into {labels} classes; of sequence classifiers, only rerankers"
            " (one score) are supported"
        )


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a classifier's outputs, in order; empty unless all of them have names."""
    named = config.get("id2label")
    if not isinstance(named, dict):
        return ()
    labels = {str(index): str(label) for index, label in named.items()}
    return tuple(labels.get(str(index), "") for index in range(len(labels)))


def task_adapter(path: Path, config: Mapping[str, Any], wanted: str) -> Adapter | None:
    """Return the adapter for a task; None if no task is set. Raises InvalidRequest, Unusable.

    Dots, hyphens and underscores in a task's name are equivalent.

    wanted: the option `task`; '' if it is not set.
    """
    needed = is_jina_v4(config)
    if not (wanted or needed):
        return None
    tasks = _tasks(path, config)
    if not wanted:
        raise InvalidRequest(
            f"task is empty, but the model needs one of {', '.join(map(shown, tasks))}: set it"
        )
    for task, find in tasks.items():
        if _plain(task) == _plain(wanted):
            return replace(find(), task=True)
    if not tasks:
        raise InvalidRequest(
            f"task is {shown(wanted)}, but the model has no tasks: leave it empty for this model"
        )
    none = "" if needed else ", or leave it empty to use none of the model's adapters"
    raise InvalidRequest(
        f"task is {shown(wanted)}, but the model's tasks are {', '.join(map(shown, tasks))}: name"
        f" one of these{none}"
    )


def is_jina_v4(config: Mapping[str, Any]) -> bool:
    """Return whether a model is jina-embeddings-v4, which has the model type of Qwen2.5-VL."""
    names = config.get("architectures") or ()
    return config.get("model_type") == "qwen2_5_vl" and "JinaEmbeddingsV4Model" in names


def _plain(task: str) -> str:
    return task.replace(".", "_").replace("-", "_")


def _tasks(path: Path, config: Mapping[str, Any]) -> dict[str, Callable[[], Adapter]]:
    """Return, for each task, a function that returns its adapter."""
    named, stacked = config.get("task_names"), config.get("lora_adaptations")
    if is_jina_v4(config) and isinstance(named, list):
        shared = path / "adapters"
        return {
            str(task): partial(inspect_adapter, shared, AdapterRequest(str(task)), str(task))
            for task in named
        }
    if found := sorted(file.parent for file in path.glob(f"*/{CONFIG}")):
        return {
            folder.name: partial(inspect_adapter, folder, AdapterRequest(folder.name))
            for folder in found
        }
    if not isinstance(stacked, list):
        return {}
    return {
        str(task): partial(_stacked, path, config, str(task), index)
        for index, task in enumerate(stacked)
    }


def _stacked(path: Path, config: Mapping[str, Any], task: str, index: int) -> Adapter:
    stated = {"lora_alpha": config.get("lora_alpha")}
    peft = replace(read_peft(stated, "config.json"), place=index)
    return Adapter(task, "lora", path / "model.safetensors", 1.0, "", peft)
