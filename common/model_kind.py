"""Determines the kind of a checkpoint from its configuration and the names of its files.

The kind is determined before weights are downloaded or read. The user's option `type` takes
precedence over the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any


class ModelKind(Enum):
    """The kinds of models, by the requests they answer. A text model also answers Embedding."""

    TEXT = "text"
    EMBEDDING = "embedding"
    RERANK = "rerank"
    TOKEN_CLASSIFY = "token_classify"
    TRANSCRIBE = "transcribe"

    @property
    def words(self) -> str:
        """What models of this kind do, as the end of a sentence that begins "the model …"."""
        return _WORDS[self]


_WORDS = {
    ModelKind.TEXT: "generates text",
    ModelKind.EMBEDDING: "turns text into vectors and does not generate text",
    ModelKind.RERANK: "ranks documents against a query and does not generate text",
    ModelKind.TOKEN_CLASSIFY: "labels words of a text and does not generate text",
    ModelKind.TRANSCRIBE: "only turns speech into text",
}
# `model_type` in config.json of the speech-to-text models that are served, and the family's name.
SPEECH_TYPES = {
    "whisper": "Whisper",
    "parakeet": "Parakeet",
    "qwen3_asr": "Qwen3-ASR",
    "voxtral": "Voxtral",
    "voxtral_realtime": "Voxtral",
    "granite_speech": "Granite Speech",
    "granite_speech_plus": "Granite Speech",
    "glmasr": "GLM-ASR",
    "moonshine": "Moonshine",
    "canary": "Canary",
    "sensevoice": "SenseVoice",
}
SPEECH_FAMILIES = ", ".join(dict.fromkeys(SPEECH_TYPES.values()))
# NVIDIA's conversions of Parakeet name no type, but the class that trained them.
_NEMO = re.compile(r"nemo\.collections\.asr\.models\.\w+\.EncDec\w*")

_ONLY_ENCODERS = frozenset({
    "albert", "bert", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert",
    "electra", "embedding_gemma2", "ernie", "eurobert", "gte", "jina_embeddings_v3",
    "llama_bidirec", "model2vec", "modernbert", "mpnet", "new", "nomic_bert",
    "roberta", "xlm-roberta", "xlm_roberta",
})  # fmt: skip
_SENTENCE_TRANSFORMERS = frozenset({"config_sentence_transformers.json", "modules.json"})


def with_model_type(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with a `model_type`; for Parakeet, it is derived from other fields."""
    if config.get("model_type") is None and _NEMO.match(str(config.get("target", ""))):
        return config | {"model_type": "parakeet"}
    return config


def kind_of(config: Mapping[str, Any], files: frozenset[str], wanted: str) -> ModelKind:
    """Return the kind of a checkpoint.

    mlx-lm loads a checkpoint with its own code (`model_file`) as a text model.

    config: the content of config.json.
    files: the names of the checkpoint's files.
    wanted: the option `type`; "" if it is not set.
    """
    if wanted:
        return ModelKind(wanted)
    if config.get("model_file"):
        return ModelKind.TEXT
    if config["model_type"] in SPEECH_TYPES:
        return ModelKind.TRANSCRIBE
    architectures = [str(name) for name in config.get("architectures") or ()]
    if any(name.endswith("ForTokenClassification") for name in architectures):
        return ModelKind.TOKEN_CLASSIFY
    # The step LogitScore of sentence-transformers scores a generated token, as in Qwen3-Reranker.
    # Models with the step Pooling make vectors, even if they were trained from a classifier.
    steps = [name.partition("/")[0] for name in files]
    classifies = any(name.endswith("ForSequenceClassification") for name in architectures)
    pools = any(step.endswith("_Pooling") for step in steps)
    if any("LogitScore" in step for step in steps) or (classifies and not pools):
        return ModelKind.RERANK
    if (
        config["model_type"] in _ONLY_ENCODERS
        or any(name.endswith("ForMaskedLM") or "Embedding" in name for name in architectures)
        or _SENTENCE_TRANSFORMERS & files
    ):
        return ModelKind.EMBEDDING
    return ModelKind.TEXT
