"""Reads the shape of an encoder such as BERT from its config.json.

The table `FAMILIES` describes all families. Some families were published with Python code and other
names of fields than in transformers 5; both forms are read. A value of a field that the network
does not compute is refused, and the error names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backend.engine.errors import Unusable
from backend.engine.loading.earlier_fields import rope_fields
from common.wording import shown

_JINA_CODE = "XLMRobertaFlashConfig"
Fields = dict[str, Any]
# transformers' names of activations → MLX's.
_ACTIVATIONS: Mapping[str, str] = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_approx"),
    **dict.fromkeys(("silu", "swish"), "silu"),
    "relu": "relu",
    "tanh": "tanh",
}


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts in some layers of an encoder."""

    count: int  # number of experts in a layer
    chosen: int  # number of experts that are chosen for each token
    every: int  # layers 1, 1 + every, … have experts

    def serve(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return layer % self.every == 1


@dataclass(frozen=True, slots=True)
class Local:
    """Layers whose tokens attend only nearby."""

    layers: tuple[bool, ...]  # for each layer of the encoder, whether its tokens attend only nearby
    reach: int  # a token attends to the tokens that are less than this far away
    theta: float  # as for `Shape`


@dataclass(frozen=True, slots=True)
class Disentangled:
    """The attention of DeBERTa, which also compares tokens with vectors of distances."""

    span: int  # there are vectors of 2 * span classes of distances
    longest: int  # the longest distance with a class of its own


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and parts of an encoder."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    inner: int  # width of the MLP
    longest: int  # maximum number of tokens
    embedded: int = 0  # width of embeddings that a matrix widens to `hidden`; 0 for `hidden`
    segments: int = 0  # number of segment embeddings; 0 for none
    epsilon: float = 1e-12
    activation: str = "gelu"
    gated: bool = False  # whether the MLP multiplies its inner values by the activation of others
    # Whether norms precede attention and MLP, instead of following the residuals.
    norms_first: bool = False
    # Whether the layers of these names have biases.
    attention_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    norm_bias: bool = True
    learned: int = 0  # number of learned positions; 0 for none
    # The id of the padding token. The first token has the position `pad + 1`; -1 if positions begin
    # with 0.
    pad: int = -1
    # Number of classes of distances between two tokens, each with a learned bias for attention; 0
    # for none.
    distances: int = 0
    theta: float = 0.0  # the base of rotary frequencies; 0 for none
    stretch: float = 1.0  # a divisor of the rotary frequencies
    local: Local | None = None
    disentangled: Disentangled | None = None
    shared: bool = False  # whether all layers have the weights of the first
    experts: Experts | None = None
    pooled: str = "cls"  # which vector a reranker's head reads, `cls` or `mean`
    pooler_bias: bool = True
    head_norm: bool = False  # whether the head has the activation of the MLP and a norm after it
    head_activation: str = "tanh"  # the activation of a reranker's head without a norm
    outputs: int = 0  # number of scores of a row, or of labels of a token; 0 for no head
    labels: bool = False  # whether each token has outputs, rather than each row


@dataclass(frozen=True, slots=True)
class Family:
    """How config.json describes the encoders of a family."""

    example: str  # a model of the family, for messages
    # Returns the fields of `Shape` that cannot be read as a number.
    complete: Callable[[Mapping[str, Any], Fields], Fields]
    # The supported values of keys in config.json. Other values are refused, because the network
    # would ignore them.
    only: Mapping[str, Any] = field(default_factory=dict)
    # The family's keys for fields of `Shape`; "" for a field that the family does not have.
    names: Mapping[str, str] = field(default_factory=dict)
    # The values of fields that config.json does not state.
    usual: Mapping[str, Any] = field(default_factory=dict)


def _learned(config: Mapping[str, Any], found: Fields) -> Fields:
    stated = config.get("hidden_act") or config.get("activation") or "gelu"
    longest = found["longest"] - found.get("pad", -1) - 1
    activation = _activation("hidden_act", stated)
    return {"learned": found["longest"], "longest": longest, "activation": activation}


def _electra(config: Mapping[str, Any], found: Fields) -> Fields:
    same = config["model_type"] == "electra" and found["embedded"] == found["hidden"]
    return _learned(config, found) | ({"embedded": 0} if same else {})


def _deberta(config: Mapping[str, Any], found: Fields) -> Fields:
    compared = config.get("pos_att_type") or ()
    parts = compared.split("|") if isinstance(compared, str) else compared
    if sorted(parts) != ["c2p", "p2c"]:
        raise _unsupported("pos_att_type", compared)
    longest = int(config.get("max_relative_positions") or 0)
    longest = longest if longest > 0 else found["longest"]
    buckets = int(config.get("position_buckets") or 0)
    return {
        "disentangled": Disentangled(buckets if buckets > 0 else longest, longest),
        "activation": _activation("hidden_act", config.get("hidden_act", "gelu")),
        "head_activation": _activation(
            "pooler_hidden_act", config.get("pooler_hidden_act", "gelu")
        ),
    }


def _activation(key: str, stated: Any) -> str:
    if stated not in _ACTIVATIONS:
        raise _unsupported(key, stated)
    return _ACTIVATIONS[stated]


def _jina(config: Mapping[str, Any], found: Fields) -> Fields:
    """Return learned or rotary positions, which begin after the padding token's id."""
    v3 = config["model_type"] == "jina_embeddings_v3"
    kind = config.get("position_embedding_type", "rotary" if v3 else "absolute")
    if kind == "absolute":
        return _learned(config, found)
    if kind != "rotary":
        raise _unsupported("position_embedding_type", kind)
    usual = 20000.0 if v3 else 10000.0
    rotary = _rotary(config, {"theta": usual} | found)
    return rotary | {"longest": found["longest"] - found["pad"] - 1}


def _nomic(config: Mapping[str, Any], found: Fields) -> Fields:
    activation = str(config["activation_function"])
    if activation not in ("swiglu", "geglu", "gelu"):
        raise _unsupported("activation_function", activation)
    experts = None
    if int(config.get("moe_every_n_layers") or 0) > 0:
        experts = Experts(
            int(config["num_experts"]), int(config["moe_top_k"]), int(config["moe_every_n_layers"])
        )
        if not 1 <= experts.chosen <= experts.count or experts.every < 2 or activation != "gelu":
            raise Unusable(
                "its layers of experts are of another kind than those of nomic-embed-text-v2-moe,"
                " which alone is supported"
            )
    longest = found["longest"]
    if config.get("rotary_scaling_factor"):  # scales with the length of a text beyond these
        longest = min(longest, int(config.get("max_trained_positions", 2048)))
    return {
        "longest": longest,
        "experts": experts,
        "inner": int(config.get("n_inner") or 4 * found["hidden"]),
        "activation": "silu" if activation == "swiglu" else "gelu",
        "gated": activation != "gelu",
        "attention_bias": config.get("qkv_proj_bias") is True,
        "up_bias": config.get("mlp_fc1_bias") is True,
        "down_bias": config.get("mlp_fc2_bias") is True,
    }


def _nomic_later(config: Mapping[str, Any], found: Fields) -> Fields:
    activation = str(config.get("hidden_act", "silu"))
    if activation not in ("silu", "gelu"):
        raise _unsupported("hidden_act", activation)
    return _rotary(config, found) | {"activation": activation}


def _modernbert(config: Mapping[str, Any], found: Fields) -> Fields:
    layers, kinds = found["layers"], config.get("layer_types")
    if isinstance(kinds, list):
        local = [kind == "sliding_attention" for kind in kinds]
    else:
        every = int(config.get("global_attn_every_n_layers", 3))
        local = [at % every != 0 for at in range(layers)]
    if len(local) != layers:
        raise ValueError(f"layer_types has {len(local)} layers, not {layers}")
    if _rotary(config, found) != {"theta": found["theta"]}:
        raise _unsupported("rope_parameters", config["rope_scaling"])
    nearby = config.get("local_rope_theta", 10000.0)
    pooled = config.get("classifier_pooling", "cls")
    if pooled not in ("cls", "mean"):
        raise _unsupported("classifier_pooling", pooled)
    return {
        "local": Local(
            tuple(local),
            int(config.get("local_attention", 128)) // 2 + 1,
            found["theta"] if nearby is None else float(nearby),
        ),
        "attention_bias": config.get("attention_bias") is True,
        "up_bias": config.get("mlp_bias") is True,
        "down_bias": config.get("mlp_bias") is True,
        "norm_bias": config.get("norm_bias") is True,
        "pooler_bias": config.get("classifier_bias") is True,
        "pooled": pooled,
    }


def _rotary(config: Mapping[str, Any], found: Fields) -> Fields:
    """Return the fields of rotary positions.

    Dynamic scaling changes nothing, because it begins after the position `longest`.
    """
    theta, stated = found["theta"], config.get("rope_scaling") or {}
    kind = stated.get("rope_type") or stated.get("type") or "default"
    factor = 1.0 if kind == "default" else float(stated["factor"])
    if kind == "ntk" and stated.get("mixed_b") is None:
        head = found["hidden"] // found["heads"]
        return {"theta": theta * factor, "stretch": factor ** (2 / head)}
    if kind == "linear":
        return {"theta": theta, "stretch": factor}
    if kind not in ("default", "dynamic"):
        raise Unusable(f"its positions are scaled by {shown(kind)}, which is not supported")
    return {"theta": theta}


_BERT = {"position_embedding_type": "absolute", "use_task_id": False, "is_decoder": False}
_GELU = {"hidden_act": "gelu", "hidden_activation": "gelu"}
_ROBERTA = {"segments": 1, "epsilon": 1e-5, "pad": 1}
FAMILIES: Mapping[str, Family] = {
    "bert": Family("BGE-M3", _learned, _BERT, usual={"segments": 2}),
    "roberta": Family("BGE-M3", _learned, _BERT, {"pad": "pad_token_id"}, _ROBERTA),
    "modernbert": Family(
        "ModernBERT-base", _modernbert, _GELU | {"classifier_activation": "gelu"},
        {"epsilon": "norm_eps", "segments": "", "theta": "global_rope_theta"},
        {"epsilon": 1e-5, "theta": 160000.0, "gated": True, "norms_first": True,
         "head_norm": True},
    ),
    "jina": Family(
        "jina-embeddings-v3", _jina, {"hidden_act": "gelu"},
        {"pad": "pad_token_id", "theta": "rotary_emb_base"}, _ROBERTA,
    ),
    "nomic": Family(
        "nomic-embed-text-v1.5", _nomic,
        {
            "prenorm": False, "use_rms_norm": False, "causal": False, "parallel_block": False,
            "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
            "rotary_emb_scale_base": None, "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False, "num_shared_experts": 0,
            "expert_choice_router": False, "moe_normalize_expert_weights": False,
        },
        {
            "hidden": "n_embd", "layers": "n_layer", "heads": "n_head", "inner": "",
            "longest": "n_positions", "epsilon": "layer_norm_epsilon", "theta": "rotary_emb_base",
        },
        {"segments": 2, "theta": 10000.0},
    ),
    "nomic of transformers": Family(
        "nomic-embed-text-v1.5", _nomic_later, names={"theta": "rope_theta"},
        usual={"segments": 2, "theta": 1000.0, "gated": True, "attention_bias": False,
               "up_bias": False, "down_bias": False},
    ),
    "gte": Family(
        "gte-multilingual-base", _rotary,
        {
            "hidden_act": "gelu", "layer_norm_type": "layer_norm",
            "position_embedding_type": "rope", "logn_attention_scale": False,
            "logn_attention_clip1": False,
        },
        {"theta": "rope_theta"}, {"segments": 1, "theta": 10000.0, "gated": True, "up_bias": False},
    ),
    "mpnet": Family(
        "all-mpnet-base-v2", _learned, _BERT,
        {"segments": "", "distances": "relative_attention_num_buckets"},
        {"pad": 1, "distances": 32},
    ),
    "distilbert": Family(
        "msmarco-distilbert-base-v4", _learned, _BERT,
        {"hidden": "dim", "layers": "n_layers", "heads": "n_heads", "inner": "hidden_dim",
         "segments": "", "epsilon": ""},
        {"head_activation": "relu"},
    ),
    "electra": Family(
        "ms-marco-electra-base", _electra, _BERT, {"embedded": "embedding_size"},
        {"segments": 2, "embedded": 128, "head_activation": "gelu"},
    ),
    "albert": Family(
        "paraphrase-albert-small-v2", _electra,
        _BERT | {"num_hidden_groups": 1, "inner_group_num": 1}, {"embedded": "embedding_size"},
        {"segments": 2, "embedded": 128, "shared": True},
    ),
    "deberta": Family(
        "mxbai-rerank-base-v1", _deberta,
        {
            "relative_attention": True, "share_att_key": True, "norm_rel_ebd": "layer_norm",
            "position_biased_input": False, "conv_kernel_size": 0,
        },
        usual={"epsilon": 1e-7},
    ),
}  # fmt: skip
# `model_type` in config.json → the family.
TYPES = {
    **dict.fromkeys(("xlm-roberta", "roberta", "camembert", "data2vec-text"), "roberta"),
    **dict.fromkeys(("bert", "ernie"), "bert"),
    **dict.fromkeys(("new", "gte"), "gte"),
    "jina_embeddings_v3": "jina",
    "nomic_bert": "nomic of transformers",
    "deberta-v2": "deberta",
    **{family: family for family in ("modernbert", "mpnet", "distilbert", "electra", "albert")},
}
# Fields of `Shape`, and their names in transformers. config.json must have those in _NEEDED.
_NEEDED = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "longest": "max_position_embeddings",
}
_NAMES = _NEEDED | {"segments": "type_vocab_size", "epsilon": "layer_norm_eps"}
_REAL = ("epsilon", "theta")
# Earlier names of what transformers 5 writes into `rope_parameters`.
_ROPE = ("rope_theta", "rotary_emb_base", "global_rope_theta", "local_rope_theta", "rope_scaling")


def family_of(config: Mapping[str, Any]) -> str:
    """Return the family of an encoder, a key of `FAMILIES`; "" for other models.

    Some of Jina's models have the model type of XLM-RoBERTa, but name code that differs from it.
    """
    model_type = str(config.get("model_type"))
    if model_type == "nomic_bert" and "n_embd" in config:
        return "nomic"
    code = config.get("auto_map")
    named = str(code.get("AutoConfig")) if isinstance(code, dict) else ""
    rotary = config.get("position_embedding_type") == "rotary"
    if model_type == "xlm-roberta" and (rotary or named.endswith(_JINA_CODE)):
        return "jina"
    return TYPES.get(model_type, "")


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape of an encoder, for which `family_of` is not "". Raises Unusable."""
    family = FAMILIES[family_of(config)]
    try:
        stated = {"rope_parameters": config.get("rope_parameters")}
        config = {**config, **rope_fields(stated, _ROPE)}
        found: Fields = dict(family.usual)
        for field_, key in {**_NAMES, **family.names}.items():
            if key in config or (key and field_ in _NEEDED):
                found[field_] = float(config[key]) if field_ in _REAL else int(config[key])
        shape = Shape(**found | family.complete(config, found))
        if shape.longest < 1:
            raise ValueError(f"{family.names.get('longest', _NEEDED['longest'])} is too small")
        fits = shape.hidden % shape.heads == 0 and shape.hidden // shape.heads % 2 == 0
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"has no {error}" if isinstance(error, KeyError) else f"has a wrong value ({error})"
        raise Unusable(f"its config.json {why}") from None
    if not fits:
        raise Unusable(
            f"{shape.heads} attention heads do not divide its {shape.hidden} hidden values"
        )
    return shape


def _unsupported(key: str, value: Any) -> Unusable:
    return Unusable(f"its {key} is {shown(value)}, which is not supported")
