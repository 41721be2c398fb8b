"""Changes weights that transformers saves to the names and layouts that mlx-lm reads.

mlx-lm reads these families as they were first published. transformers saves some of them under
other names, or with experts in another layout; nearly all fine-tuned models have these forms.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlx.utils import tree_flatten

if TYPE_CHECKING:
    import mlx.core as mx

# Patterns of transformers' names, and the names for them, in the order in which they are applied.
Rules = Sequence[tuple[str, str]]
PARTS_FIRST: Rules = [
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.(?=vision_tower\.|multi_modal_projector\.|mm_projector\.)", ""),
]
KIMI: Rules = [
    *PARTS_FIRST,
    (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
]
MINIMAX: Rules = [
    *PARTS_FIRST,
    (r"^multi_modal_projector\.merge_", "patch_merge_mlp."),
    (r"^(vision_tower\.)embeddings\.proj\.", r"\1vision_model.embeddings.patch_embedding."),
    (r"^(vision_tower\.)(?=layers\.)", r"\1vision_model.encoder."),
    (r"^(vision_tower\.)(?=pre_layrnorm\.)", r"\1vision_model."),
    (r"\.mlp\.gate\.(?=e_score_)", ".block_sparse_moe."),
    (r"\.mlp\.(?=experts\.|gate\.|shared_experts\.)", ".block_sparse_moe."),
    (r"(\.experts\.\d+)\.gate_proj\.", r"\1.w1."),
    (r"(\.experts\.\d+)\.down_proj\.", r"\1.w2."),
    (r"(\.experts\.\d+)\.up_proj\.", r"\1.w3."),
    (r"\.indexer\.", ".index_"),
]
# By model type, for mlx-lm's names. A name that the model has itself stays.
_RENAMED: Mapping[str, Rules] = {
    "bailing_hybrid": [(r"\.attention\.dense\.", ".attention.o_proj.")],
    "gemma3": PARTS_FIRST,
    "gpt2": [(r"^transformer\.", "")],
    "granitemoe": [(r"\.router\.weight$", ".router.layer.weight")],
    "granitemoehybrid": [(r"\.router\.weight$", ".router.layer.weight")],
    "kimi_k25": KIMI,
    "kimi_linear": [(r"\.block_sparse_moe\.((?:gate|up|down)_proj)\.", r".mlp.\1.")],
    "laguna": [(r"\.mlp\.shared_experts\.", ".mlp.shared_expert.")],
    "llama4": [(r"^(model|lm_head)\.", r"language_model.\1.")],
    "llama4_text": [(r"^lm_head\.", "output.")],
    "minimax_m3_vl": MINIMAX,
    "mimo_v2_flash": [(r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias")],
    "muse_glimmer": [(r"^model\.(?=vision_)", "")],
    "nanochat": [
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.layers\.", "transformer.h."),
        (r"\.self_attn\.o_proj\.", ".attn.c_proj."),
        (r"\.self_attn\.([qkv])_proj\.", r".attn.c_\1."),
        (r"\.mlp\.fc1\.", ".mlp.c_fc."),
        (r"\.mlp\.fc2\.", ".mlp.c_proj."),
    ],
    "olmo_hybrid": [
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ],
}
# Prefixes of the weights of heads for multi-token prediction. mlx-lm drops DeepSeek-V3's if it is
# layer 61, and Qwen3-Next's if MLX has not converted the model.
_PREDICTS = {"deepseek_v3": "model.layers.{}.", "qwen3_next": "mtp."}
_SEPARATE = ("glm4v_moe", "kimi_k25", "minimax_m3_vl", "qwen3_next")
_DOWN, _GATES_AND_VALUES = ".down_proj.weight", ".experts.gate_up_proj"
_OTHER_GATES = "gate_up_proj.weight"  # of dense layers and shared experts
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_TIED = ("embed_tokens.weight", "word_embeddings.weight")
_EMBEDDED = "model.language_model.embed_tokens.weight"


def with_saved_weights(family: Any, config: Mapping[str, Any]) -> Any:
    """Return a subclass of a family of mlx-lm that reads all of its forms."""
    model_type = str(config["model_type"])
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    tied = any(part.get("tie_word_embeddings") for part in parts)

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        own = _own_weights(self)
        weights = separate(weights, model_type)
        weights = {_own_name(name, model_type, own): each for name, each in weights.items()}
        if model_type in _PREDICTS:
            head = _PREDICTS[model_type].format(config["num_hidden_layers"])
            weights = {name: each for name, each in weights.items() if not name.startswith(head)}
        if model_type == "gpt_oss":
            # Experts that are not quantised have matrices of (experts, inputs, outputs).
            dense = [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]
            weights |= {f"{name}.weight": weights.pop(name).swapaxes(1, 2) for name in dense}
        elif model_type == "longcat_flash":
            # Experts that return their input have no weights.
            count = config["n_routed_experts"]
            weights = {
                name: each
                for name, each in weights.items()
                if not (found := _EXPERT.search(name)) or int(found[1]) < count
            }
        elif model_type == "olmo_hybrid":
            weights |= _divided(weights)
        elif model_type == "qwen3_5_moe":
            weights = joined_experts(weights)
        elif model_type == "qwen3_vl_moe":
            transpose_experts(weights, own)
            # mlx-lm reads the head without asking whether there is one.
            if tied and _EMBEDDED in weights:
                weights.setdefault("lm_head.weight", weights[_EMBEDDED])
        weights = _own_experts(weights, own)
        if hasattr(family, "sanitize"):
            weights = family.sanitize(self, weights)
            if model_type == "kimi_vl":
                weights = _with_latent_parts(self.language_model, weights)
            own = _own_weights(self)  # some families give up their head
        head = next((name for name in own if name.endswith("lm_head.weight")), "")
        if tied and head not in weights:  # most families without a choice have a head
            same = next((each for name, each in weights.items() if name.endswith(_TIED)), None)
            weights |= {head: same} if head and same is not None else {}
        if tied and not head:
            weights = {name: each for name, each in weights.items() if "lm_head." not in name}
        return weights

    members = {"sanitize": sanitize, "__module__": family.__module__}
    return type(family.__name__, (family,), members)


def _with_latent_parts(language: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights as layers of DeepSeek-V3 read them, which mlx-lm's Kimi VL omits to do."""
    from mlx_lm.models import deepseek_v3

    prefix = "language_model."
    inner = {name.removeprefix(prefix): each for name, each in weights.items()}
    sanitized = deepseek_v3.Model.sanitize(language, inner)
    return {f"{prefix}{name}": each for name, each in sanitized.items()}


def _own_weights(model: Any) -> dict[str, mx.array]:
    found: Any = tree_flatten(model.parameters())
    return dict(found)


def _own_name(name: str, model_type: str, own: Collection[str]) -> str:
    if f"{name.rpartition('.')[0]}.weight" in own:
        return name
    for pattern, replacement in _RENAMED.get(model_type, ()):
        name = re.sub(pattern, replacement, name)
    return name


def _own_experts(weights: dict[str, mx.array], own: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights with all experts of a layer as the model's layers have them.

    transformers computes with such matrices too, but has one for gates and values, [experts, 2 ×
    inner, hidden]. It saves them with `save_original_format=False`, under the names that its own
    code has for the parts of the layer.
    """
    of_experts = [name for name in own if name.endswith(_DOWN) and own[name].ndim == 3]
    found = dict(weights)
    for name in [name for name in weights if name.endswith(_GATES_AND_VALUES)]:
        block = name.removesuffix(_GATES_AND_VALUES)
        layer = block.rpartition(".")[0]
        fitting = [down for down in of_experts if down.startswith(f"{layer}.")]
        down = f"{block}.experts.down_proj"
        if len(fitting) != 1 or down not in weights:
            continue
        base = fitting[0].removesuffix(_DOWN)
        count, _, inner = own[fitting[0]].shape
        if weights[name].shape[1] != 2 * inner:
            continue
        parts = weights[name][:count].split(2, axis=1)
        found[f"{base}.gate_proj.weight"], found[f"{base}.up_proj.weight"] = parts
        found[f"{base}{_DOWN}"] = weights[down][:count]
        del found[name], found[down]
        for other in [other for other in found if other.startswith(f"{block}.")]:
            named = base.rpartition(".")[0] + other.removeprefix(block)
            if other not in own and named in own:
                found[named] = found.pop(other)
    return found


def separate(weights: Mapping[str, mx.array], model_type: str) -> dict[str, mx.array]:
    """Return the weights with a matrix for each expert, if a family's were published that way.

    By the names of single experts, mlx-lm recognises weights that MLX has not converted.
    """
    found = dict(weights)
    if model_type not in _SEPARATE:
        return found
    if model_type == "minimax_m3_vl":
        # MLX's own form has all experts of a layer in one array, and may be quantised.
        for name in [name for name in found if name.endswith(_OTHER_GATES)]:
            base = name.removesuffix(_OTHER_GATES)
            if found[name].ndim == 2 and f"{base}gate_up_proj.scales" not in found:
                halves = found.pop(name).split(2)
                found[f"{base}gate_proj.weight"], found[f"{base}up_proj.weight"] = halves
    for name in [name for name in weights if name.endswith(_GATES_AND_VALUES)]:
        experts = name.removesuffix("gate_up_proj")
        gates, values = found.pop(name).split(2, axis=1)
        parts = {"gate": gates, "up": values, "down": found.pop(f"{experts}down_proj")}
        for part, whole in parts.items():
            for number, matrix in enumerate(whole):
                found[f"{experts}{number}.{part}_proj.weight"] = matrix
    return found


def joined_experts(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights with all experts of a layer in one array, as mlx-lm's layers have them."""
    import mlx.core as mx

    found: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, value in weights.items():
        if match := _EXPERT.search(name):
            together = f"{name[: match.start()]}.switch_mlp.{name[match.end() :]}"
            experts.setdefault(together, {})[int(match[1])] = value
        else:
            found[name] = value
    return found | {
        name: mx.stack([numbered[number] for number in sorted(numbered)])
        for name, numbered in experts.items()
    }


def transpose_experts(weights: dict[str, mx.array], own: Mapping[str, mx.array]) -> None:
    """Transpose Qwen3-VL's experts if they are [experts, outputs, inputs], as transformers' are."""
    base = next(name for name in own if name.endswith(f"switch_mlp{_DOWN}"))
    experts, hidden, inner = own[base].shape
    computed = (experts, 2 * inner, hidden), (experts, hidden, inner)
    for name in [name for name in weights if name.endswith(_GATES_AND_VALUES)]:
        pair = name, f"{name.removesuffix('gate_up_proj')}down_proj"
        if tuple(weights[each].shape for each in pair) == computed:
            weights |= {each: weights[each].swapaxes(1, 2) for each in pair}


def _divided(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the convolutions of linear attention with as many channels as their projections.

    transformers computes with one convolution for queries, keys and values, and saves thirds of it.
    """
    import mlx.core as mx

    found: dict[str, mx.array] = {}
    for name in weights:
        before, mark, _ = name.partition(".q_conv1d.weight")
        if mark:
            names = [f"{before}.{part}_conv1d.weight" for part in ("q", "k", "v")]
            whole = mx.concatenate([weights[part] for part in names])
            rows = [weights[f"{before}.{part}_proj.weight"].shape[0] for part in ("q", "k")]
            parts = mx.split(whole, [rows[0], sum(rows)])
            found |= dict(zip(names, parts, strict=True))
    return found
