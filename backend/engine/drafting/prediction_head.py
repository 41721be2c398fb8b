"""A model's own head for multi-token prediction (MTP), read from its checkpoint.

The head is one more layer, trained with the model. It predicts the next token from a token's
embedding and the hidden state from which the model chose the token (DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 2.2), and shares the model's embedding and output
projection. mlx-lm implements the layers of such heads, but drops the heads' weights.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.cache import make_prompt_cache

from backend.engine.drafting.heads import Head, HeadError, Weights, embedding_of, load_weights
from backend.engine.loading.checkpoint import Checkpoint
from backend.engine.loading.saved_weights import joined_experts
from backend.engine.loading.shards import all_weight_files
from common.drafter_kind import SPLIT_HEADS

_INNER = re.compile(r"(?:.+\.)?(?:model|backbone)\.((?:layers|norm|norm_f)\..+)")
_LAYERS = ("model.", "backbone.")
# The fields with the kinds of the layers of Nemotron's head: one character each, or words.
_HEAD_LAYERS = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")


class NoHeadError(HeadError):
    """There is no head. A head that cannot be used is a HeadError."""


@dataclass(frozen=True, slots=True)
class _Family:
    """How checkpoints of a family name the parts of a head.

    The "model" below is an mlx-lm model that consists of the head's layers.
    """

    # A pattern for the names of the head's tensors. The group is the name of a part, and `{layers}`
    # stands for the number of layers of the main model.
    tensors: str
    # Patterns for the names of parts outside the layers.
    projection: str
    of_token: str
    of_state: str
    norm: str
    layer: str  # prefix of the names of layers' parts in the model
    changes: Mapping[str, Any]  # changes to the main model's configuration to build the model
    # The pattern for a checkpoint of the head alone, as mlx-vlm's `convert --mtp` writes it.
    alone: str = r"(?:mtp\.)?(.+)"
    # The configuration's field with the number of layers per head; '' means one layer.
    depth: str = ""
    last: str = "model.norm"  # name of the norm after the layers in the model
    # Whether the published weights of norms lack the 1 that mlx-lm adds at load.
    centred: bool = False
    state_first: bool = False  # as in `PredictionHead`

    def renamed(self, part: str) -> str:
        """Return the name of a part in `PredictionHead`, or in the model for parts of layers."""
        module, _, parameter = part.rpartition(".")
        for pattern, own in (
            (self.projection, "projection"),
            (self.of_token, "of_token"),
            (self.of_state, "of_state"),
            (self.norm, self.last),
        ):
            if re.fullmatch(pattern, module):
                return f"{own}.{parameter}"
        return self.layer + part

    def config(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of the model."""
        found = {
            **own,
            **self.changes,
            "num_hidden_layers": int(own.get(self.depth) or 1),
            "tie_word_embeddings": True,
        }
        if self is _NEMOTRON:
            pattern, kinds = (own.get(name) for name in _HEAD_LAYERS)
            found |= {"hybrid_override_pattern": pattern, "layers_block_type": kinds}
            found["num_hidden_layers"] = len(pattern or kinds or ())
        found.pop("text_config", None)
        return found


_QWEN = _Family(
    tensors=r"(?:.+\.)?mtp\.(.+)",
    projection="fc",
    of_token="pre_fc_norm_embedding",
    of_state="pre_fc_norm_hidden",
    norm="norm",
    layer="model.",
    changes={"full_attention_interval": 1, "decoder_sparse_step": 1, "mlp_only_layers": ()},
    depth="mtp_num_hidden_layers",
    centred=True,
)
_NEXT_LAYER = _Family(
    tensors=r"(?:.+\.)?layers\.{layers}\.(.+)",
    alone=r"(?:model|mtp)\.(?:mtp_block\.)?(.+)",
    projection="eh_proj",
    of_token="enorm",
    of_state="hnorm",
    norm="shared_head[._]norm",
    layer="model.layers.0.",
    changes={"first_k_dense_replace": 0},
)
_NEMOTRON = _Family(
    tensors=r"(?:.+\.)?mtp\.(.+)",
    projection=r"layers\.0\.eh_proj",
    of_token=r"layers\.0\.enorm",
    of_state=r"layers\.0\.hnorm",
    norm=r"layers\.\d+\.final_layernorm",
    layer="backbone.",
    changes={"layer_types": None},
    last="backbone.norm_f",
)
# In the checkpoints' modeling_mimo.py, the state precedes the token in the projection's input.
_MIMO = _Family(
    tensors=r"(?:.+\.)?mtp_layers\.0\.(.+)",
    projection="input_proj",
    of_token="token_layernorm",
    of_state="hidden_layernorm",
    norm="final_layernorm",
    layer="model.layers.0.",
    changes={},
    state_first=True,
)
_FAMILIES = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), _QWEN),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), _NEXT_LAYER),
    "nemotron_h": _NEMOTRON,
    "mimo": _MIMO,
}


class PredictionHead(Head):
    """The prediction head of a model.

    body: an mlx-lm model that consists of the head's layers.
    embedding: the main model's token embedding.
    state_first: whether the state precedes the token's embedding in the projection's input.
    """

    projection: Any
    of_token: Any
    of_state: Any
    make_cache: Any

    def __init__(
        self, body: Any, embedding: Any, size: int, eps: float, *, state_first: bool = False
    ) -> None:
        inner = getattr(body, "model", None) or body.backbone
        super().__init__(inner, embedding, size)
        embeddings = "embed_tokens" if hasattr(inner, "embed_tokens") else "embeddings"
        setattr(inner, embeddings, lambda vectors: vectors)  # the head creates its inputs itself
        # Nemotron's model reads the index of its first recurrent layer; the head has no such layer.
        self._nothing = [None] if embeddings == "embeddings" else []
        if hasattr(inner, "ssm_idx"):
            inner.ssm_idx = -1 if self._nothing else None
        self.projection = Linear(2 * size, size, bias=False)
        self.of_token = RMSNorm(size, eps)
        self.of_state = RMSNorm(size, eps)
        self.make_cache = lambda: make_prompt_cache(body)  # `body` is not a part of the head
        self._state_first = state_first
        self.cast_predicate = getattr(body, "cast_predicate", lambda _: True)

    def read(self, embedded: mx.array, states: mx.array, cache: Sequence[Any]) -> mx.array:
        """Read the states, [rows, tokens, size]; logits are projected from the result."""
        pair = [self.of_token(embedded), self.of_state(states)]
        if self._state_first:
            pair.reverse()
        fed = self.projection(mx.concatenate(pair, axis=-1))
        found: mx.array = self.inner(fed, [*cache, *self._nothing])
        return found


def open_head(
    checkpoint: Checkpoint, model: Any, vocabulary: int, alone: Checkpoint | None = None
) -> PredictionHead:
    """Return the head of a loaded model, with lazy weights. Raises NoHeadError, HeadError.

    alone: a checkpoint of the head alone; None if the head is in the model's checkpoint.
    """
    config = checkpoint.config
    own = {**config, **config.get("text_config", {}), "model_type": config["model_type"]}
    family = _FAMILIES.get(own["model_type"])
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise NoHeadError(
            f"this backend reads such heads for {known}, but not for {own['model_type']}"
        )
    if alone is not None:
        _require_same_model(own, alone.config)
        own = {**own, **alone.config.get("text_config", {}), "model_type": own["model_type"]}
        pattern, files = family.alone, all_weight_files(alone.path)
    else:
        pattern = family.tensors.replace("{layers}", str(own["num_hidden_layers"]))
        files = all_weight_files(checkpoint.path)
    weights, raw = _weights(files, re.compile(pattern), family)
    if not weights and checkpoint.missing:
        raise HeadError(f"its checkpoint lacks the files {checkpoint.missing}")
    if not weights:
        raise NoHeadError(
            "its checkpoint lacks the head's weights, which conversions to MLX drop; the original"
            " checkpoint may have them"
        )
    module = importlib.import_module(f"mlx_lm.models.{own['model_type']}")
    body = module.Model(module.ModelArgs.from_dict(family.config(own)))
    head = PredictionHead(
        body,
        embedding_of(model, vocabulary),
        own["hidden_size"],
        own.get("rms_norm_eps") or own["layer_norm_epsilon"],
        state_first=family.state_first,
    )
    weights = _as_served(weights, body, raw=raw and family.centred and alone is None)
    load_weights(head, weights, str(own["model_type"]))
    return head


def _require_same_model(own: Mapping[str, Any], head: Mapping[str, Any]) -> None:
    """Raise HeadError if the head was split from a model of another family or size."""
    text = head.get("text_config", {})
    families = SPLIT_HEADS[head["model_type"]]
    if own["model_type"] not in families:
        raise HeadError(f"it is for a model of type {' or '.join(families)}")
    for name in ("hidden_size", "vocab_size"):
        if text.get(name, own[name]) != own[name]:
            raise HeadError(
                f"it was trained for a model whose {name} is {text[name]}, but that of this model"
                f" is {own[name]}"
            )


def _weights(
    files: Sequence[Path], pattern: re.Pattern[str], family: _Family
) -> tuple[Weights, bool]:
    """Return the head's tensors under new names, and whether they have their original form.

    Other tensors in a file show the form. For a file of the head's tensors alone, the metadata
    state whether a conversion has written the file.
    """
    found: Weights = {}
    raw = False
    for file in files:
        loaded: Any = mx.load(str(file), return_metadata=True)
        tensors, metadata = loaded
        own = [
            (match, value) for name, value in tensors.items() if (match := pattern.fullmatch(name))
        ]
        for match, value in own:
            found[family.renamed(match[1])] = value
        raw |= any(
            name.endswith("conv1d.weight") and value.shape[-1] != 1
            for name, value in tensors.items()
        )
        raw |= 0 < len(own) == len(tensors) and metadata.get("format") != "mlx"
    return found, raw


def _as_served(weights: Weights, body: Any, *, raw: bool) -> Weights:
    """Return the weights in the form and with the names of `PredictionHead`.

    mlx-lm changes the weights of layers, for example by stacking experts. mlx-lm recognises the
    original form by a convolution's weights, which are added for this purpose.
    """
    own = {name: value for name, value in weights.items() if name.startswith(_LAYERS)}
    beside = {name: value for name, value in weights.items() if name not in own}
    if raw:
        beside = {name: value + 1 if value.ndim == 1 else value for name, value in beside.items()}
        own["model.layers.0.linear_attn.conv1d.weight"] = mx.zeros((1, 1, 2))
    if hasattr(body, "sanitize"):
        own = body.sanitize(own)
    # Qwen3.5's checkpoints have one tensor per expert in the head, but stacked experts elsewhere.
    for name, value in joined_experts(own).items():
        if match := _INNER.fullmatch(name):
            beside[f"inner.{match[1]}"] = value
    return beside
