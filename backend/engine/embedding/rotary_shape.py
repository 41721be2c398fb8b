"""The shape of a BERT that mlx-vlm does not have, from its config.json.

Jina embeddings v3, Nomic Embed and GTE were published with Python code of their own, each with its
own names. transformers 5 has classes for them, with other names. Both are read here, before any
weight is, and what the network does not compute is refused by name. MPNet and DistilBERT are read
here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.engine.errors import ModelRejected
from common.wording import shown

# Families of models, by the code that they were published with.
JINA, NOMIC, GTE, MPNET, DISTILBERT = "jina", "nomic", "gte", "mpnet", "distilbert"
_TYPES = {
    "jina_embeddings_v3": JINA,
    "nomic_bert": NOMIC,
    "new": GTE,
    "gte": GTE,
    "mpnet": MPNET,
    "distilbert": DISTILBERT,
}
_JINA_CODE = "XLMRobertaFlashConfig"
# By family: the values of config.json that the network computes (others are refused, because they
# would be ignored), and a model that has these values.
REQUIRED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    JINA: ({"hidden_act": "gelu"}, "jina-embeddings-v3"),
    NOMIC: (
        {
            "prenorm": False,
            "use_rms_norm": False,
            "causal": False,
            "parallel_block": False,
            "rotary_emb_fraction": 1.0,
            "rotary_emb_interleaved": False,
            "rotary_emb_scale_base": None,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "num_shared_experts": 0,
            "expert_choice_router": False,
            "moe_normalize_expert_weights": False,
        },
        "nomic-embed-text-v1.5",
    ),
    GTE: (
        {
            "hidden_act": "gelu",
            "layer_norm_type": "layer_norm",
            "position_embedding_type": "rope",
            "logn_attention_scale": False,
            "logn_attention_clip1": False,
        },
        "gte-multilingual-base",
    ),
    MPNET: ({"hidden_act": "gelu"}, "all-mpnet-base-v2"),
    DISTILBERT: ({"activation": "gelu"}, "msmarco-distilbert-base-v4"),
}


@dataclass(frozen=True, slots=True)
class Experts:
    """chosen: of `count`, for each token. every: layers 1, 1 + every, … have them."""

    count: int
    chosen: int
    every: int

    def serve(self, layer: int) -> bool:
        return layer % self.every == 1


@dataclass(frozen=True, slots=True)
class Positions:
    """theta: the base of rotary frequencies; 0 for learned positions. stretch: divides frequencies.

    learned: number of learned positions. pad: the padding token, whose id is also the position
    before the first token's; -1 if the first token has the position 0. distances: number of classes
    of distances between two tokens, each with a learned bias of the attention; 0 for none.
    """

    theta: float = 0.0
    stretch: float = 1.0
    learned: int = 0
    pad: int = 0
    distances: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and parts of a BERT whose norms follow its residuals.

    inner: width of the MLP. segments: number of segment embeddings; 0 for none. gated: whether the
    MLP multiplies its inner values by activated ones. *_bias: of the layers with these names in the
    network. longest: maximum number of tokens.
    """

    family: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    inner: int
    segments: int
    epsilon: float
    activation: str
    gated: bool
    attention_bias: bool
    up_bias: bool
    down_bias: bool
    positions: Positions
    longest: int
    experts: Experts | None = None


def family_of(config: Mapping[str, Any]) -> str:
    """The family of a model that the network computes; "" for other models.

    Jina's models have the type of XLM-RoBERTa and name code that computes something else.
    """
    model_type = str(config.get("model_type"))
    if model_type != "xlm-roberta":
        return _TYPES.get(model_type, "")
    code = config.get("auto_map")
    named = str(code.get("AutoConfig")) if isinstance(code, dict) else ""
    rotary = config.get("position_embedding_type") == "rotary"
    return JINA if rotary or named.endswith(_JINA_CODE) else ""


def shape_of(name: str, config: Mapping[str, Any]) -> Shape:
    """The shape of a model for which `family_of` is not "". name: the model's.

    Raises ModelRejected.
    """
    family = family_of(config)
    try:
        shape = _READERS[family](name, config)
        fits = shape.hidden % shape.heads == 0 and shape.hidden // shape.heads % 2 == 0
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        said = f"has no {error}" if isinstance(error, KeyError) else f"has a wrong value ({error})"
        raise ModelRejected.because(name, f"its config.json {said}") from None
    if not fits:
        raise ModelRejected.because(
            name, f"{shape.heads} attention heads do not divide its {shape.hidden} hidden values"
        )
    return shape


def _sizes(config: Mapping[str, Any], *, segments: int, epsilon: float) -> dict[str, Any]:
    """The sizes under transformers' names. segments, epsilon: defaults if config.json has none."""
    return {
        "vocabulary": int(config["vocab_size"]),
        "hidden": int(config["hidden_size"]),
        "layers": int(config["num_hidden_layers"]),
        "heads": int(config["num_attention_heads"]),
        "inner": int(config["intermediate_size"]),
        "segments": int(config.get("type_vocab_size", segments)),
        "epsilon": float(config.get("layer_norm_eps", epsilon)),
    }


def _jina(name: str, config: Mapping[str, Any]) -> Shape:
    pad, most = int(config.get("pad_token_id", 1)), int(config["max_position_embeddings"])
    ours = config["model_type"] == "jina_embeddings_v3"
    kind = config.get("position_embedding_type", "rotary" if ours else "absolute")
    if kind == "absolute":
        positions, limit = Positions(learned=most, pad=pad), 0
    elif kind == "rotary":
        theta = float(config.get("rotary_emb_base", 20000.0 if ours else 10000.0))
        positions, limit = _rotation(name, config, theta, 0)
    else:
        raise ModelRejected.because(
            name, f"its position_embedding_type is {shown(kind)}, which is not supported"
        )
    sizes = _sizes(config, segments=1, epsilon=1e-5)
    return _plain(JINA, sizes, positions, (limit or most) - pad - 1)


def _gte(name: str, config: Mapping[str, Any]) -> Shape:
    head = int(config["hidden_size"]) // int(config["num_attention_heads"])
    most = int(config["max_position_embeddings"])
    positions, limit = _rotation(name, config, float(config.get("rope_theta", 10000.0)), head)
    return Shape(
        family=GTE,
        **_sizes(config, segments=1, epsilon=1e-12),
        activation="gelu",
        gated=True,
        attention_bias=True,
        up_bias=False,
        down_bias=True,
        positions=positions,
        longest=limit or most,
    )


def _nomic(name: str, config: Mapping[str, Any]) -> Shape:
    """The shape from Nomic's own keys, or from those of transformers' NomicBertConfig."""
    if "n_embd" not in config:
        return _nomic_of_transformers(name, config)
    activation = str(config["activation_function"])
    if activation not in ("swiglu", "geglu", "gelu"):
        raise ModelRejected.because(
            name, f"its activation_function is {shown(activation)}, which is not supported"
        )
    experts = None
    if int(config.get("moe_every_n_layers") or 0) > 0:
        experts = Experts(
            int(config["num_experts"]), int(config["moe_top_k"]), int(config["moe_every_n_layers"])
        )
        if not 1 <= experts.chosen <= experts.count or experts.every < 2 or activation != "gelu":
            raise ModelRejected.because(
                name,
                "its layers of experts are of another kind than those of nomic-embed-text-v2-moe,"
                " which alone is supported",
            )
    longest = int(config["n_positions"])
    if config.get("rotary_scaling_factor"):  # scales with the length of a text beyond these
        longest = min(longest, int(config.get("max_trained_positions", 2048)))
    return Shape(
        family=NOMIC,
        vocabulary=int(config["vocab_size"]),
        hidden=int(config["n_embd"]),
        layers=int(config["n_layer"]),
        heads=int(config["n_head"]),
        inner=int(config.get("n_inner") or 4 * int(config["n_embd"])),
        segments=int(config.get("type_vocab_size", 2)),
        epsilon=float(config["layer_norm_epsilon"]),
        activation="silu" if activation == "swiglu" else "gelu",
        gated=activation != "gelu",
        attention_bias=config.get("qkv_proj_bias") is True,
        up_bias=config.get("mlp_fc1_bias") is True,
        down_bias=config.get("mlp_fc2_bias") is True,
        positions=Positions(float(config.get("rotary_emb_base", 10000.0))),
        longest=longest,
        experts=experts,
    )


def _nomic_of_transformers(name: str, config: Mapping[str, Any]) -> Shape:
    activation = str(config.get("hidden_act", "silu"))
    if activation not in ("silu", "gelu"):
        raise ModelRejected.because(
            name, f"its hidden_act is {shown(activation)}, which is not supported"
        )
    positions, limit = _rotation(name, config, 1000.0, 0)
    return Shape(
        family=NOMIC,
        **_sizes(config, segments=2, epsilon=1e-12),
        activation=activation,
        gated=True,
        attention_bias=False,
        up_bias=False,
        down_bias=False,
        positions=positions,
        longest=limit or int(config["max_position_embeddings"]),
    )


def _mpnet(_: str, config: Mapping[str, Any]) -> Shape:
    most, pad = int(config["max_position_embeddings"]), 1
    distances = int(config.get("relative_attention_num_buckets", 32))
    return _plain(
        MPNET,
        _sizes({**config, "type_vocab_size": 0}, segments=0, epsilon=1e-12),
        Positions(learned=most, pad=pad, distances=distances),
    )


def _distilbert(_: str, config: Mapping[str, Any]) -> Shape:
    named = {
        "hidden_size": config["dim"],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "intermediate_size": config["hidden_dim"],
        "vocab_size": config["vocab_size"],
    }
    positions = Positions(learned=int(config["max_position_embeddings"]), pad=-1)
    return _plain(DISTILBERT, _sizes(named, segments=0, epsilon=1e-12), positions)


def _plain(
    family: str, sizes: dict[str, Any], positions: Positions, longest: int | None = None
) -> Shape:
    """A BERT with biases everywhere and without a gate. longest: None means by the positions."""
    return Shape(
        family=family,
        **sizes,
        activation="gelu",
        gated=False,
        attention_bias=True,
        up_bias=True,
        down_bias=True,
        positions=positions,
        longest=positions.learned - positions.pad - 1 if longest is None else longest,
    )


_READERS = {JINA: _jina, NOMIC: _nomic, GTE: _gte, MPNET: _mpnet, DISTILBERT: _distilbert}


def _rotation(
    name: str, config: Mapping[str, Any], theta: float, head: int
) -> tuple[Positions, int]:
    """The rotary positions, and the length up to which they are right; 0 for any length.

    theta: the base without `rope_parameters`. head: the size of an attention head.
    """
    stated = config.get("rope_parameters")
    if isinstance(stated, dict):
        theta = float(stated["rope_theta"])
    else:
        stated = config.get("rope_scaling") or {}
    kind, factor = stated.get("rope_type") or stated.get("type") or "default", 1.0
    if kind != "default":
        factor = float(stated["factor"])
    if kind == "ntk" and head and stated.get("mixed_b") is None:
        return Positions(theta * factor, factor ** (2 / head)), 0
    if kind == "linear":
        return Positions(theta, factor), 0
    if kind == "dynamic":  # scales with the length of a text beyond these
        return Positions(theta), int(config["max_position_embeddings"])
    if kind != "default":
        raise ModelRejected.because(
            name, f"its positions are scaled by {shown(kind)}, which is not supported"
        )
    return Positions(theta), 0
