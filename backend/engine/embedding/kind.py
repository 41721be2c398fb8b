"""Decides the kind of a checkpoint from its configuration and the names of its files.

This happens before a download and before any weight is read, so nothing here needs MLX. The user's
option `type` takes precedence over the files; a load request's flags are only checked against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from backend.engine.errors import InvalidRequest, ModelRejected
from common.wording import shown


class ModelKind(Enum):
    """The kind of request that a loaded model answers. A text model also answers Embedding."""

    TEXT = "text"
    EMBEDDING = "embedding"
    RERANK = "rerank"
    TOKEN_CLASSIFY = "token_classify"

    @property
    def words(self) -> str:
        """What such a model does, as a predicate: "the model …"."""
        return _WORDS[self]


_WORDS = {
    ModelKind.TEXT: "generates text",
    ModelKind.EMBEDDING: "turns text into vectors and does not generate text",
    ModelKind.RERANK: "ranks documents against a query and does not generate text",
    ModelKind.TOKEN_CLASSIFY: "labels words of a text and does not generate text",
}

# `model_type` in config.json → the module of mlx-vlm that computes it. RoBERTa and CamemBERT have
# the same layers and positions as XLM-RoBERTa.
_ROBERTAS = {"xlm-roberta": "xlm_roberta", "roberta": "xlm_roberta", "camembert": "xlm_roberta"}
FAMILIES: Mapping[ModelKind, Mapping[str, str]] = {
    ModelKind.EMBEDDING: {
        "bert": "bert",
        **_ROBERTAS,
        "modernbert": "modernbert",
        "qwen3": "qwen3_embedding",
        "gemma3_text": "gemma3_embedding",
        "embedding_gemma2": "embedding_gemma2",
        "lfm2": "lfm2_embedding",
        "ministral3": "ministral3_embedding",
        "llama_bidirec": "llama_bidirec",
    },
    ModelKind.RERANK: {"bert": "bert", **_ROBERTAS, "modernbert": "modernbert", "qwen3": ""},
    ModelKind.TOKEN_CLASSIFY: {
        "bert": "bert",
        "openai_privacy_filter": "openai_privacy_filter",
    },
}
_ONLY_ENCODERS = frozenset({
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra",
    "embedding_gemma2", "ernie", "llama_bidirec", "modernbert", "mpnet", "new", "nomic_bert",
    "roberta", "xlm-roberta", "xlm_roberta",
})  # fmt: skip
_SENTENCE_TRANSFORMERS = frozenset({"config_sentence_transformers.json", "modules.json"})
# Rerankers that answer "yes" or "no": generating models, distinguished by their prompts.
ANSWERING_RERANKERS = frozenset({"qwen3"})


def kind_of(config: Mapping[str, Any], files: frozenset[str], wanted: str) -> ModelKind:
    """The kind of a checkpoint. wanted: the option `type`; "" if it is not set.

    A checkpoint with its own code (`model_file`) is loaded by mlx-lm, as a text model.
    """
    if wanted:
        return ModelKind(wanted)
    if config.get("model_file"):
        return ModelKind.TEXT
    architectures = [str(name) for name in config.get("architectures") or ()]
    if any(name.endswith("ForTokenClassification") for name in architectures):
        return ModelKind.TOKEN_CLASSIFY
    if any(name.endswith("ForSequenceClassification") for name in architectures):
        return ModelKind.RERANK
    if (
        config["model_type"] in _ONLY_ENCODERS
        or any(name.endswith("ForMaskedLM") or "Embedding" in name for name in architectures)
        or _SENTENCE_TRANSFORMERS & files
    ):
        return ModelKind.EMBEDDING
    return ModelKind.TEXT


def with_flags(
    kind: ModelKind, config: Mapping[str, Any], *, embeddings: bool, reranking: bool
) -> ModelKind:
    """The kind, given a load request's flags Embeddings and Reranking. Raises InvalidRequest."""
    if reranking and kind is ModelKind.TEXT and config["model_type"] in ANSWERING_RERANKERS:
        kind = ModelKind.RERANK
    if reranking and kind is not ModelKind.RERANK:
        raise InvalidRequest(
            f"Reranking is true, but the model {kind.words}: load a cross-encoder or a Qwen3"
            " reranker, or turn it off in the model's configuration"
        )
    if embeddings and kind not in (ModelKind.TEXT, ModelKind.EMBEDDING):
        raise InvalidRequest(
            f"Embeddings is true, but the model {kind.words}: load an embedding model, or turn it"
            " off in the model's configuration"
        )
    return kind


def require_family(name: str, kind: ModelKind, config: Mapping[str, Any]) -> None:
    """Raise ModelRejected for a model that mlx-vlm cannot compute, or would compute wrongly."""
    families = FAMILIES[kind]
    model_type = config["model_type"]
    if model_type not in families:
        raise ModelRejected.because(
            name,
            f"it {kind.words}, and its model type {shown(model_type)} is not among the supported"
            f" ones: {_listed(sorted(families))}; load one of those",
        )
    if kind is ModelKind.RERANK and model_type in ANSWERING_RERANKERS and _scores(config):
        raise ModelRejected.because(
            name,
            "it was converted to give a score instead of an answer; load the original, such as"
            " Qwen3-Reranker-0.6B, with Reranking set",
        )
    if kind is ModelKind.RERANK and model_type not in ANSWERING_RERANKERS:
        _require_one_score(name, config)
    if kind is ModelKind.TOKEN_CLASSIFY and not labels_of(config):
        raise ModelRejected.because(name, "its config.json does not name the labels (id2label)")
    for key, computed in (
        ("hidden_act", ("gelu",)),
        ("hidden_activation", ("gelu",)),
        ("position_embedding_type", ("absolute",)),
    ):
        value = config.get(key, computed[0])
        if "bert" in families[model_type] and value not in computed:
            raise ModelRejected.because(
                name,
                f"its {key} is {shown(value)}, but only {_listed(computed)} is supported; load a"
                " model that has that, such as BGE-M3",
            )


def _scores(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures") or ()
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def _require_one_score(name: str, config: Mapping[str, Any]) -> None:
    labels = config.get("num_labels") or len(labels_of(config)) or 1
    if labels != 1:
        raise ModelRejected.because(
            name,
            f"it classifies texts into {labels} classes; of sequence classifiers, only rerankers"
            " (one score) are supported",
        )


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a classifier's outputs, in order; empty unless all of them have names."""
    named = config.get("id2label")
    if not isinstance(named, dict):
        return ()
    labels = {str(index): str(label) for index, label in named.items()}
    return tuple(labels.get(str(index), "") for index in range(len(labels)))


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words)
