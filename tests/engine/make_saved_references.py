"""Writes what transformers saves of small models, and the logits that PyTorch computes with it.

Run where transformers and torch are installed; the project itself does not need torch:

    python -m tests.engine.make_saved_references
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.engine.saved_references import REFERENCES, SEEING_REFERENCES, TOKENS, drawn

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_DEEPSEEK = _SIZES | _LATENT | _EXPERTS
_KIMI = _DEEPSEEK | {"num_experts": 4, "num_experts_per_token": 2}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
CASES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _KIMI | {"head_dim": 8, "layer_group_size": 2},
    "deepseek_v3": _DEEPSEEK | {"tie_word_embeddings": True, "n_shared_experts": 1},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64},
    "gpt_oss": _SIZES | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    # mlx-lm rounds YaRN's limits, which is what `truncate` means; OpenAI's models do not.
    | {"rope_parameters": {"rope_type": "yarn", "factor": 32.0, "rope_theta": 1e4,
       "original_max_position_embeddings": 128, "truncate": True}},
    "kimi_k25": {
        "text_config": {"model_type": "deepseek_v3"} | _DEEPSEEK,
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                          "num_attention_heads": 2, "pos_emb_height": 2, "pos_emb_width": 2},
    },
    "kimi_linear": _KIMI | _LINEAR | {"linear_head_dim": 16, "linear_num_heads": 4,
                                      "q_lora_rank": None},
    "llama4_text": _SIZES | {"num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 4,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 40,
        "attention_chunk_size": 24, "rms_norm_eps": 1e-6},
    "longcat_flash": _SIZES | _LATENT | {"num_layers": 1, "num_hidden_layers": 2, "head_dim": 8,
        "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "moe_topk": 2,
        "zero_expert_num": 2},
    "mimo_v2_flash": _SIZES | _EXPERTS | {"num_hidden_layers": 3, "head_dim": 24, "v_head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "minimax_m2": _SIZES | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                            "partial_rotary_factor": 0.5}},
    "minicpm3": _SIZES | _LATENT | {"head_dim": 8, "v_head_dim": 8, "dim_model_base": 16,
        "tie_word_embeddings": False},
    "nanochat": _SIZES | {"rms_norm_eps": 1e-5},
    "olmo_hybrid": _SIZES | _LINEAR | {"linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}  # fmt: skip
_SPARSE = _SIZES | _EXPERTS
# Saved under the names of transformers' code, with all experts of a layer in one matrix.
COMPUTED: dict[str, dict[str, Any]] = {
    "dots1": _SPARSE | {"n_shared_experts": 1, "head_dim": 16},
    "granitemoe": _SPARSE | {"embedding_multiplier": 2.0, "tie_word_embeddings": True},
    "laguna": _SPARSE | {"num_experts": 4, "shared_expert_intermediate_size": 16, "head_dim": 16,
                         "sliding_window": 24},
    "longcat_flash": CASES["longcat_flash"],
    "mimo_v2_flash": CASES["mimo_v2_flash"],
    "minimax_m2": CASES["minimax_m2"],
    "mixtral": _SPARSE | {"sliding_window": None},
    "qwen3_moe": _SPARSE | {"num_experts": 4, "head_dim": 16},
    "qwen3_next": _SPARSE | _LINEAR | {"num_experts": 4, "shared_expert_intermediate_size": 16,
        "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}  # fmt: skip

_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
_SIGLIP = {"vision_config": _TOWER | {"model_type": "siglip_vision_model"}}
_CLIP = {"vision_config": _TOWER | {"model_type": "clip_vision_model"}}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                 "mrope_section": [2, 1, 1]}}  # fmt: skip
_OF_QWEN = _SIZES | _SECTIONS | {"tie_word_embeddings": False}
_QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
               "out_hidden_size": 32, "patch_size": 14, "spatial_merge_size": 2}  # fmt: skip
_TIED = {"tie_word_embeddings": True}
# Models with images, of which the logits of text are compared. mlx-vlm rounds the root of
# Gemma 3's width, which scales its embeddings; transformers does not scale Aya Vision's logits.
SEEING: dict[str, dict[str, Any]] = {
    "aya_vision": _SIGLIP | {"text_config": {"model_type": "cohere2"} | _SIZES | {
            "num_hidden_layers": 4, "logit_scale": 1.0}},
    "deepseek_v4": _DEEPSEEK | {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 32,
        "compress_ratios": [0, 4, 128, 4], "hc_mult": 2, "num_hash_layers": 1, "o_groups": 2,
        "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 32, "sliding_window": 24,
        "qk_rope_head_dim": 16},
    "gemma3": _SIGLIP | _TIED | {"mm_tokens_per_image": 4,
        "text_config": {"model_type": "gemma3_text"} | _SIZES | {"head_dim": 8,
            "num_hidden_layers": 6, "hidden_size": 64}},
    "glm_ocr": {"text_config": _OF_QWEN | {"head_dim": 8},
        "vision_config": _QWEN_TOWER | {"image_size": 28}},
    "hunyuan_vl": _TIED | {"text_config": _SIZES | {"head_dim": 8, "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0,
            "mrope_section": [1, 1, 1, 1]}},
        "vision_config": _TOWER | {"out_hidden_size": 32}},
    "internvl": _TIED | {"text_config": {"model_type": "qwen3"} | _SIZES | {"head_dim": 8},
        "vision_config": _TOWER | {"image_size": [28, 28], "patch_size": [14, 14]}},
    "kimi_k25": CASES["kimi_k25"] | {"projection_hidden_size": 16},
    "lfm2_vl": {"vision_config": _TOWER | {"model_type": "siglip2_vision_model"},
        "text_config": {"model_type": "lfm2"} | _SIZES | {
            "layer_types": ["conv", "full_attention"]}},
    "llava": _CLIP | {"text_config": {"model_type": "llama"} | _SIZES, "image_seq_length": 4},
    # mlx-vlm gives all heads the same blocks if there are more than `index_topk_blocks`.
    "minimax_m3_vl": {"vision_config": _TOWER, "projector_hidden_size": 32,
        "text_config": _SIZES | {"num_hidden_layers": 3, "head_dim": 16, "rms_norm_eps": 1e-5,
            "dense_intermediate_size": 48, "intermediate_size": 24, "shared_intermediate_size": 16,
            "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                "partial_rotary_factor": 0.5},
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8,
            "index_topk_blocks": 5}},
    "mistral3": _TIED | {"text_config": {"model_type": "mistral"} | _SIZES | {"head_dim": 8},
        "vision_config": _TOWER | {"model_type": "pixtral"}},
    "mistral3 with mistral4": {"vision_config": _TOWER | {"model_type": "pixtral"},
        "text_config": {"model_type": "mistral4"} | _DEEPSEEK | {
            "n_shared_experts": 1, "pad_token_id": 0}},
    "molmo2": {"text_config": _SIZES | {"head_dim": 8, "additional_vocab_size": 8},
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
            "image_size": [28, 28], "patch_size": 14},
        "adapter_config": {"vision_feature_layer": [1, 0], "hidden_size": 16, "head_dim": 8,
            "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16,
            "text_hidden_size": 32}},
    "paligemma": _SIGLIP | _TIED | {"projection_dim": 32,
        "text_config": {"model_type": "gemma"} | _SIZES | {"head_dim": 8}},
    "qwen3_vl_moe": {"text_config": _OF_QWEN | {"head_dim": 8, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "vision_config": _QWEN_TOWER | {"deepstack_visual_indexes": [0],
            "num_position_embeddings": 4}},
}  # fmt: skip
SEEING_COMPUTED: dict[str, dict[str, Any]] = {
    "gemma3": SEEING["gemma3"],
    "glm4v_moe": {"text_config": _OF_QWEN | _EXPERTS | {"head_dim": 16, "n_shared_experts": 1},
        "vision_config": _QWEN_TOWER | {"image_size": 28}},
    "hunyuan_vl": SEEING["hunyuan_vl"],
    "kimi_k25": SEEING["kimi_k25"],
    "llava": SEEING["llava"],
    "minimax_m3_vl": SEEING["minimax_m3_vl"],
    "molmo2": SEEING["molmo2"],
    "qwen2_5_vl": {"text_config": _OF_QWEN, "vision_config": _QWEN_TOWER},
}  # fmt: skip


def reference(family: str, stated: dict[str, Any], *, published: bool) -> dict[str, Any]:
    import torch  # type: ignore[import-not-found]
    import transformers

    kind = transformers.AutoModelForCausalLM
    if "text_config" in stated:
        kind = transformers.AutoModelForImageTextToText
    config = transformers.AutoConfig.for_model(family.split()[0], **stated)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind.from_config(config, dtype=torch.float32).save_pretrained(
            folder, save_original_format=published
        )
        file = folder / "model.safetensors"
        shapes = {name: list(value.shape) for name, value in load_file(file).items()}
        weights = {name: drawn(name, shape) for name, shape in sorted(shapes.items())}
        save_file(weights, file, metadata={"format": "pt"})
        model = kind.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, ::8]
        saved = json.loads((folder / "config.json").read_text())
    return {
        "config": saved,
        "shapes": shapes,
        "logits": np.round(logits.numpy().astype(float), 5).tolist(),
    }


if __name__ == "__main__":
    found = {family: reference(family, stated, published=True) for family, stated in CASES.items()}
    found |= {
        f"{family} as computed": reference(family, stated, published=False)
        for family, stated in COMPUTED.items()
    }
    REFERENCES.write_text(json.dumps(found, separators=(",", ":")))
    seeing = {
        family: reference(family, stated, published=True) for family, stated in SEEING.items()
    }
    seeing |= {
        f"{family} as computed": reference(family, stated, published=False)
        for family, stated in SEEING_COMPUTED.items()
    }
    SEEING_REFERENCES.write_text(json.dumps(seeing, separators=(",", ":")))
