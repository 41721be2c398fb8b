"""Small checkpoints of families whose released models are mostly mixtures of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.vision.checkpoint_files import (
    EXPERTS,
    LATENT,
    MOONVIT,
    PIXELS,
    QWEN_MARKER,
    SIGLIP,
    TEXT,
    add_tokens,
    read,
    write,
    write_config,
)
from tests.engine.vision.qwen_families import write_glm4v

_ROPE = {"rope_theta": 10000.0}
_SEES_AHEAD = {
    "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_double_wide_mlp": False,
}


def write_gemma4(path: Path) -> None:
    """Shared KV, inputs of their own for each layer, and windows shorter than the prompt."""
    named = {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}
    ids = add_tokens(path, [*named.values(), "<|video|>"], named["image_token"])
    tokens = read(path, "tokenizer_config.json")
    write(path, "tokenizer_config.json", tokens | {"extra_special_tokens": named})
    size = max(ids.values()) + 1
    write_config(path, ids, {
        "model_type": "gemma4",
        "image_token_id": ids["<|image|>"],
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "video_token_id": ids["<|video|>"],
        "audio_token_id": size,
        "eos_token_id": [2],
        "text_config": TEXT | {
            "model_type": "gemma4_text",
            "vocab_size_per_layer_input": size,
            "hidden_size_per_layer_input": 16,
            "head_dim": 32,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 16,
            "patch_size": 8,
            "position_embedding_size": 64,
            "default_output_length": 4,
        },
    })  # fmt: skip
    (path / "preprocessor_config.json").unlink()
    images = {"patch_size": 8, "max_soft_tokens": 4, "pooling_kernel_size": 3}
    own: dict[str, Any] = {"processor_class": "Gemma4Processor", "image_processor": images}
    write(path, "processor_config.json", own)


def write_gemma4_moe(path: Path) -> None:
    """The shape of the 26B: an image's tokens attend to each other; experts run beside the MLP."""
    write_gemma4(path)
    config = read(path, "config.json")
    config["text_config"] |= _SEES_AHEAD | {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    }
    config["vision_config"]["default_output_length"] = 20
    write(path, "config.json", config)
    own = read(path, "processor_config.json")
    own["image_processor"]["max_soft_tokens"] = 20
    write(path, "processor_config.json", own)


def write_gemma4_unified(path: Path) -> None:
    """Gemma 4's attention, and patches of the image in place of a tower."""
    write_gemma4(path)
    config = read(path, "config.json") | {"model_type": "gemma4_unified", "audio_config": None}
    config["text_config"] |= _SEES_AHEAD | {"model_type": "gemma4_unified_text"}
    config["vision_config"] = {"mm_embed_dim": 128, "output_proj_dims": 128}
    write(path, "config.json", config)
    write(path, "processor_config.json", {"processor_class": "Gemma4UnifiedProcessor"})


def write_llama4(path: Path) -> None:
    """Attention in chunks shorter than the prompt, and tiles with separators between them."""
    marks = ["<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>"]
    marks += ["<|tile_x_separator|>", "<|tile_y_separator|>"]
    ids = add_tokens(path, marks, "<|image|>")
    write_config(path, ids, {
        "model_type": "llama4",
        "image_token_index": ids["<|patch|>"],
        "eos_token_id": [2],
        "text_config": TEXT | _ROPE | {
            "model_type": "llama4_text",
            "head_dim": 32,
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "attention_chunk_size": 24,
            "interleave_moe_layer_step": 2,
            "floor_scale": 16,
            "eos_token_id": [2],
        },
        "vision_config": {
            "model_type": "llama4_vision_model",
            "hidden_size": 32,
            "image_size": 56,
            "initializer_range": 0.02,
            "intermediate_size": 128,
            "norm_eps": 1e-5,
            "num_attention_heads": 2,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "patch_size": 14,
            "pixel_shuffle_ratio": 0.5,
            "projector_dropout": 0.0,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "rope_theta": 10000.0,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "vision_output_dim": 64,
        },
    })  # fmt: skip
    sizes = {"size": {"height": 56, "width": 56}, "max_patches": 2, "patch_size": 14}
    write(path, "preprocessor_config.json", PIXELS | {"processor_class": "Llama4Processor"} | sizes)


def write_glm4v_moe(path: Path) -> None:
    """GLM-4V's shape with experts."""
    write_glm4v(path)
    config = read(path, "config.json") | {"model_type": "glm4v_moe"}
    config["text_config"] |= {
        "model_type": "glm4v_moe_text",
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
        "attention_bias": True,
    }
    config["vision_config"] |= {"model_type": "glm4v_moe", "out_hidden_size": 128}
    write(path, "config.json", config)
    pixels = read(path, "preprocessor_config.json")
    write(path, "preprocessor_config.json", pixels | {"processor_class": "Glm4vMoeProcessor"})


def write_kimi_k25(path: Path) -> None:
    """Kimi VL's parts, and a tower that also knows time."""
    marks = ["<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
    ids = add_tokens(path, marks, "".join(marks))
    write_config(path, ids, {
        "model_type": "kimi_k25",
        "media_placeholder_token_id": ids["<|media_pad|>"],
        "text_config": TEXT | LATENT | EXPERTS | _ROPE | {
            "model_type": "kimi_k2",
            "n_group": 1,
            "topk_group": 1,
        },
        "vision_config": MOONVIT,
    })  # fmt: skip
    write(path, "preprocessor_config.json", {
        "processor_class": "KimiK25Processor",
        "media_proc_cfg": {"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 64},
    })  # fmt: skip


def write_granite_vision(path: Path) -> None:
    """The image as tiles. mlx-vlm counts one number of tiles and encodes another."""
    ids = add_tokens(path, ["<image>"], "<image>")
    size = max(ids.values()) + 1
    _granite(path, {
        "model_type": "granite_vision",
        "vision_feature_layer": [-2, -1],
        "text_config": TEXT | _ROPE | {"model_type": "granite", "vocab_size": size},
    }, ids["<image>"])  # fmt: skip


def write_granite4_vision(path: Path) -> None:
    """Features of the tower that are added to several layers."""
    ids = add_tokens(path, ["<image>"], "<image>")
    size = max(ids.values()) + 1
    _granite(path, {
        "model_type": "granite4_vision",
        "downsample_rate": "2/4",
        "deepstack_layer_map": [[-2, 0], [-1, 1]],
        "spatial_target_layers": [2, 3, 3, 3],
        "text_config": TEXT | _ROPE | {
            "model_type": "granitemoehybrid",
            "vocab_size": size,
            "shared_intermediate_size": 256,
        },
    }, ids["<image>"])  # fmt: skip


def _granite(path: Path, config: dict[str, Any], token: int) -> None:
    grids = [[56, 56], [56, 112], [112, 56], [112, 112]]
    size = config["text_config"]["vocab_size"]
    tower = {"model_type": "siglip_vision_model", "hidden_size": 64}
    write(path, "config.json", config | {
        "vocab_size": size,
        "image_token_index": token,
        "vision_feature_select_strategy": "full",
        "image_grid_pinpoints": grids,
        "eos_token_id": 2,
        "vision_config": SIGLIP | tower,
    })  # fmt: skip
    own: dict[str, Any] = {
        "processor_class": "LlavaNextProcessor",
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"height": 56, "width": 56},
        "crop_size": {"height": 56, "width": 56},
        "image_grid_pinpoints": grids,
    }
    write(path, "preprocessor_config.json", PIXELS | own)
    write(path, "processor_config.json", {
        "processor_class": "LlavaNextProcessor",
        "patch_size": SIGLIP["patch_size"],
        "vision_feature_select_strategy": "full",
        "image_token": "<image>",
    })  # fmt: skip


def write_molmo2(path: Path) -> None:
    """Crops of an image that are pooled in groups, and embeddings in two parts."""
    marks = ["<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>"]
    marks += ["<im_low>", "<frame_start>", "<frame_end>"]
    ids = add_tokens(path, marks, "<|image|>")
    first = min(ids.values())
    write(path, "config.json", {
        "model_type": "molmo2",
        "image_start_token_id": ids["<im_start>"],
        "image_end_token_id": ids["<im_end>"],
        "image_patch_id": ids["<im_patch>"],
        "image_col_id": ids["<im_col>"],
        "low_res_image_start_token_id": ids["<low_res_im_start>"],
        "image_low_res_id": ids["<im_low>"],
        "frame_start_token_id": ids["<frame_start>"],
        "frame_end_token_id": ids["<frame_end>"],
        "eos_token_id": 2,
        "text_config": TEXT | _ROPE | {
            "model_type": "molmo2_text",
            "vocab_size": first,
            "additional_vocab_size": len(marks),
            "head_dim": 32,
        },
        "vit_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
        "adapter_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "text_hidden_size": TEXT["hidden_size"],
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vit_layers": [-1, -3],
        },
    })  # fmt: skip
    write(path, "preprocessor_config.json", {"processor_class": "Molmo2Processor"})


def write_fastvlm(path: Path) -> None:
    """One token, outside the vocabulary, for a whole image, and a tower of convolutions."""
    template = path / "chat_template.jinja"
    template.write_text(template.read_text().replace(QWEN_MARKER, ""))
    (path / "video_preprocessor_config.json").unlink()
    size = read(path, "config.json")["text_config"]["vocab_size"]
    write(path, "config.json", TEXT | _ROPE | {
        "model_type": "llava_qwen2",
        "vocab_size": size,
        "eos_token_id": 2,
        "mm_vision_tower": "mobileclip_l_1024",
        "mm_hidden_size": 256,
        "tie_word_embeddings": False,
    })  # fmt: skip
    own = {"crop_size": {"height": 256, "width": 256}, "size": {"shortest_edge": 256}}
    write(path, "preprocessor_config.json", {"processor_class": "FastVLMProcessor"} | own)


def small_convolutions(patch: pytest.MonkeyPatch) -> None:
    """mlx-vlm fixes the size of FastVLM's tower in its code."""
    from mlx_vlm.models.fastvlm.config import VisionConfig

    patch.setattr(VisionConfig, "layers", [1] * 5)
    patch.setattr(VisionConfig, "embed_dims", [8, 16, 32, 64, 128])


def write_multi_modality(path: Path) -> None:
    """Janus and DeepSeek-VL: a tower of one size, and 576 tokens for each image."""
    ids = add_tokens(path, ["<image_placeholder>", "<image>"], "<image>")
    (path / "preprocessor_config.json").unlink()
    write_config(path, ids, {
        "model_type": "multi_modality",
        "image_token_index": ids["<image>"],
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": {
            "model_type": "vision",
            "cls": "CLIPVisionTower",
            "params": {"image_size": 384, "select_layer": -1},
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
        },
        "aligner_config": {
            "cls": "MlpProjector",
            "model_type": "aligner",
            "params": {"depth": 2, "projector_type": "mlp_gelu", "input_dim": 32, "n_embed": 128},
        },
    })  # fmt: skip
    own = {"image_processor_type": "VLMImageProcessor", "image_size": 384}
    write(path, "preprocessor_config.json", own | {"processor_class": "VLChatProcessor"})
    write(path, "processor_config.json", {"processor_class": "VLChatProcessor"})


def write_youtu_vl(path: Path) -> None:
    """Latent attention, with the text's configuration on the top level; no processor."""
    config = read(path, "config.json")
    ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    write(path, "config.json", TEXT | LATENT | _ROPE | ids | {
        "model_type": "youtu_vl",
        "vocab_size": config["text_config"]["vocab_size"],
        "eos_token_id": 2,
        "vision_config": {
            "model_type": "siglip2_vision_model",
            "hidden_size": 32,
            "out_hidden_size": TEXT["hidden_size"],
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_patches": 256,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
    })  # fmt: skip
    (path / "preprocessor_config.json").unlink()
    (path / "video_preprocessor_config.json").unlink()
    kind = {"image_processor_type": "Siglip2ImageProcessorFast", "patch_size": 14}
    write(path, "preprocessor_config.json", {"processor_class": "YoutuVLProcessor"} | kind)
