"""Small checkpoints of other vision families with random weights, in their own file formats.

Tokenizer and chat template are those of the small vision model, with the family's own control
tokens for images.
"""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from backend.engine.vision.patches import opencv_replaced
from tests.engine.vision import (
    further_families,
    llava_families,
    ocr_families,
    omni_families,
    qwen_families,
    recent_families,
)
from tests.engine.vision.checkpoint_files import (
    EXPERTS,
    LATENT,
    MOONVIT,
    PIXELS,
    SIGLIP,
    TEXT,
    add_tokens,
    read,
    write,
    write_config,
)
from tests.engine.vision.seeing import TINY_VISION

_GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_MINICPM_TOKENS = [
    "<image>",
    "</image>",
    "<image_id>",
    "</image_id>",
    "<slice>",
    "</slice>",
    "<unk>",
    "<|audio_start|>",
]
_MINICPM_TOKENS += ["<|audio_end|>", "<|spk_bos|>", "<|spk_eos|>", "<|tts_bos|>", "<|tts_eos|>"]
_IDEFICS_TOKENS = [
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]

_FILES = (
    sys.modules[__name__],
    further_families,
    llava_families,
    ocr_families,
    omni_families,
    qwen_families,
    recent_families,
)


def write_family(path: Path, family: str) -> Path:
    """A folder with a checkpoint of a family, for instance `qwen3_5`."""
    path.mkdir()
    for file in TINY_VISION.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, path)
    writer = next(filter(None, (getattr(file, f"write_{family}", None) for file in _FILES)))
    writer(path)
    _write_weights(path)
    return path


def write_qwen3_5(path: Path) -> None:
    """Multimodal RoPE beside layers with recurrent state."""
    config = read(path, "config.json") | {"model_type": "qwen3_5"}
    text = config["text_config"]
    del text["rope_scaling"]
    text |= {
        "model_type": "qwen3_5_text",
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "rope_parameters": {
            "type": "default",
            "mrope_section": [3, 3, 2],
            "rope_theta": 10000,
            "partial_rotary_factor": 0.5,
        },
    }
    config["vision_config"] |= {"model_type": "qwen3_5", "deepstack_visual_indexes": []}
    write(path, "config.json", config)


def write_qwen3_5_moe(path: Path) -> None:
    """Qwen3.5 with experts."""
    write_qwen3_5(path)
    config = read(path, "config.json") | {"model_type": "qwen3_5_moe"}
    config["vision_config"]["model_type"] = "qwen3_5_moe"
    config["text_config"] |= {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    write(path, "config.json", config)


def write_indic_ocr(path: Path) -> None:
    """Qwen 3.5 under another name."""
    write_qwen3_5(path)
    write(path, "config.json", read(path, "config.json") | {"model_type": "indic_ocr"})


def write_qwen4_exp(path: Path) -> None:
    """Streams of hidden states, sparse attention, and embeddings of the latest tokens together."""
    write_qwen3_5_moe(path)
    config = read(path, "config.json") | {"model_type": "qwen4_exp"}
    config["vision_config"]["model_type"] = "qwen4_exp"
    config["text_config"] |= {
        "model_type": "qwen4_exp_text",
        "eos_token_id": 2,
        "hc_count": 2,
        "hc_lowrank": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 1024,
        "indexer_compress_ratio": 4,
    }
    write(path, "config.json", config)


def write_minicpmv4_6(path: Path) -> None:
    """Qwen 3.5's text model beside another tower; an image has as many positions as tokens."""
    write_qwen3_5(path)
    text = read(path, "config.json")["text_config"]
    ids = add_tokens(path, _MINICPM_TOKENS, "<|image_pad|>")
    write(path, "config.json", {
        "model_type": "minicpmv4_6",
        "image_size": 112,
        "patch_size": 14,
        "insert_layer_id": 0,
        "eos_token_id": [2],
        "text_config": text | {"vocab_size": max(ids.values()) + 1},
        "vision_config": SIGLIP | {"model_type": "siglip_vision_model", "image_size": 112},
    })  # fmt: skip
    write(path, "preprocessor_config.json", {
        "processor_class": "MiniCPMVProcessor",
        "image_processor_type": "MiniCPMVImageProcessor",
        "patch_size": 14,
        "scale_resolution": 112,
    })  # fmt: skip


def write_minicpmv4_7(path: Path) -> None:
    """Like MiniCPM-V 4.6, with an image and its tiles on one grid of positions."""
    write_minicpmv4_6(path)
    config = read(path, "config.json") | {"model_type": "minicpmv4_7"}
    added = read(path, "tokenizer.json")["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    config |= {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "image_start_id": ids["<image>"],
        "image_end_id": ids["</image>"],
        "slice_start_id": ids["<slice>"],
        "slice_end_id": ids["</slice>"],
        "newline_id": read(path, "tokenizer.json")["model"]["vocab"]["Ċ"],
    }
    write(path, "config.json", config)
    pixels = read(path, "preprocessor_config.json")
    own = {"processor_class": "MiniCPMV4_7Processor", "scale_resolution": 28}
    write(path, "preprocessor_config.json", pixels | own)


def write_gemma3(path: Path) -> None:
    """Sliding windows shorter than the prompt, and line breaks around an image."""
    ids = add_tokens(path, list(_GEMMA_TOKENS.values()), _GEMMA_TOKENS["boi_token"])
    tokens = read(path, "tokenizer_config.json")
    tokens |= {
        "extra_special_tokens": _GEMMA_TOKENS,
        "image_token_id": ids[_GEMMA_TOKENS["image_token"]],
    }
    write(path, "tokenizer_config.json", tokens)
    size = max(ids.values()) + 1
    text = TEXT | {
        "model_type": "gemma3_text",
        "vocab_size": size,
        "head_dim": 32,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
        "mm_tokens_per_image": 4,
    }
    write_config(path, ids, {
        "model_type": "gemma3",
        "hidden_size": TEXT["hidden_size"],
        "image_token_index": ids[_GEMMA_TOKENS["image_token"]],
        "mm_tokens_per_image": 4,
        "text_config": text,
        "vision_config": SIGLIP | {"model_type": "siglip_vision_model"},
    })  # fmt: skip
    own = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    kind = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}}
    write(path, "preprocessor_config.json", PIXELS | own | kind)
    write(path, "processor_config.json", own)


def write_idefics3(path: Path) -> None:
    """An image as tiles, each with tokens and text around it."""
    ids = add_tokens(path, _IDEFICS_TOKENS, "<image>")
    write_config(path, ids, {
        "model_type": "idefics3",
        "image_token_id": ids["<image>"],
        "scale_factor": 2,
        "text_config": TEXT | {"model_type": "llama", "rope_theta": 10000.0},
        "vision_config": SIGLIP | {"model_type": "idefics3"},
    })  # fmt: skip
    own = {"processor_class": "Idefics3Processor", "image_seq_len": 4}
    kind = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 112},
        "max_image_size": {"longest_edge": 56},
        "do_image_splitting": True,
        "do_pad": True,
    }
    write(path, "preprocessor_config.json", PIXELS | own | kind)
    write(path, "processor_config.json", own)


def write_idefics2(path: Path) -> None:
    """A token before and after each image, one between two, and a space before the next word."""
    write_idefics3(path)
    config = read(path, "config.json") | {"model_type": "idefics2"}
    config["text_config"] |= {"model_type": "mistral"}
    config["vision_config"] |= {"model_type": "idefics2"}
    config["perceiver_config"] = {
        "model_type": "idefics2",
        "num_key_value_heads": 1,
        "resampler_depth": 1,
        "resampler_head_dim": 16,
        "resampler_n_heads": 2,
        "resampler_n_latents": 4,
    }
    write(path, "config.json", config)
    own = {"processor_class": "Idefics2Processor", "image_seq_len": 4}
    kind = {
        "image_processor_type": "Idefics2ImageProcessor",
        "size": {"shortest_edge": 28, "longest_edge": 56},
        "do_image_splitting": True,
        "do_pad": True,
    }
    write(path, "preprocessor_config.json", PIXELS | own | kind)
    write(path, "processor_config.json", own)


def write_smolvlm(path: Path) -> None:
    """Idefics3's shape under another name, and with another processor."""
    write_idefics3(path)
    for name in ("config.json", "preprocessor_config.json", "processor_config.json"):
        text = (path / name).read_text()
        (path / name).write_text(text.replace("Idefics3", "SmolVLM").replace("idefics3", "smolvlm"))
    config = read(path, "config.json")
    config["vision_config"]["model_type"] = "smolvlm_vision"
    write(path, "config.json", config)


def write_ministral3(path: Path) -> None:
    """Queries scaled by their position, which changes after 48 tokens, and rows of an image."""
    ids = add_tokens(path, ["[IMG]", "[IMG_BREAK]", "[IMG_END]"], "[IMG]")
    rope = {"type": "default", "rope_type": "default", "rope_theta": 10000.0}
    rope |= {"llama_4_scaling_beta": 2.0, "original_max_position_embeddings": 48}
    text = TEXT | {"model_type": "ministral3", "head_dim": 32}
    write_config(path, ids, {
        "model_type": "mistral3",
        "image_token_index": ids["[IMG]"],
        "spatial_merge_size": 2,
        "text_config": text | {"rope_theta": 10000.0, "rope_parameters": rope},
        "vision_config": SIGLIP | {"model_type": "pixtral", "head_dim": 16},
    })  # fmt: skip
    own = {"processor_class": "Mistral3Processor", "patch_size": 14, "spatial_merge_size": 2}
    write(path, "processor_config.json", own)
    kind = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 56}}
    write(path, "preprocessor_config.json", PIXELS | kind | {"patch_size": 14})


def write_mistral4(path: Path) -> None:
    """Ministral 3 with latent attention and experts."""
    write_ministral3(path)
    config = read(path, "config.json")
    config["text_config"] |= LATENT | EXPERTS | {"model_type": "mistral4", "qk_head_dim": 32}
    write(path, "config.json", config)


def write_minimax_m3_vl(path: Path) -> None:
    """Attention to selected blocks of keys, with caches of its own kind."""
    marks = [f"]<]{name}[>[" for name in ("image", "video", "start of image", "end of image")]
    ids = add_tokens(path, marks, marks[0])
    size = max(ids.values()) + 1
    text = TEXT | {
        "model_type": "minimax_m3",
        "vocab_size": size,
        "head_dim": 32,
        "rope_theta": 10000.0,
        "intermediate_size": 64,
        "dense_intermediate_size": 256,
        "shared_intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 32,
            "sparse_num_index_heads": 2,
            "sparse_topk_blocks": 3,
            "sparse_block_size": 8,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 1, 1],
        },
    }
    write_config(path, ids, {
        "model_type": "minimax_m3_vl",
        "image_token_index": ids[marks[0]],
        "video_token_index": ids[marks[1]],
        "vision_start_token_id": ids[marks[2]],
        "vision_end_token_id": ids[marks[3]],
        "projector_hidden_size": 64,
        "text_config": text,
        "vision_config": SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 128},
    })  # fmt: skip
    own = {"processor_class": "MiniMaxM3VLProcessor", "patch_size": 14, "merge_size": 2}
    limits = {"min_pixels": 3136, "max_pixels": 12544, "temporal_patch_size": 2}
    write(path, "preprocessor_config.json", PIXELS | own | limits)


def write_cohere2_moe(path: Path) -> None:
    """Text only, of a family that mlx-lm does not have."""
    base = read(path, "config.json")
    (path / "preprocessor_config.json").unlink()
    (path / "video_preprocessor_config.json").unlink()
    write(path, "config.json", {
        **TEXT,
        "model_type": "cohere2_moe",
        "vocab_size": base["text_config"]["vocab_size"],
        "head_dim": 32,
        "intermediate_size": 64,
        "prefix_dense_intermediate_size": 256,
        "sliding_window": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "layer_norm_eps": 1e-5,
        "eos_token_id": 2,
    })  # fmt: skip


def write_deepseek_v4(path: Path) -> None:
    """Text only: windows of compressed KV, each of which overlaps with the one before it."""
    base = read(path, "config.json")
    (path / "preprocessor_config.json").unlink()
    (path / "video_preprocessor_config.json").unlink()
    write(path, "config.json", {
        **TEXT,
        "model_type": "deepseek_v4",
        "vocab_size": base["text_config"]["vocab_size"],
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "compress_ratios": [0, 4, 128, 4],
        "hc_mult": 2,
        "num_hash_layers": 0,
        "sliding_window": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "eos_token_id": 2,
    })  # fmt: skip


def write_internvl_chat(path: Path) -> None:
    """The marker is plain text and missing in the template; tiles have no text around them."""
    ids = add_tokens(path, ["<img>", "</img>", "<IMG_CONTEXT>"], "")
    write_config(path, ids, {
        "model_type": "internvl_chat",
        "image_token_index": ids["<IMG_CONTEXT>"],
        "downsample_ratio": 0.5,
        "force_image_size": 56,
        "max_dynamic_patch": 2,
        "text_config": TEXT | {
            "model_type": "qwen2",
            "head_dim": 32,
            "rope_theta": 10000.0,
        },
        "vision_config": SIGLIP | {"model_type": "intern_vit_6b"},
    })  # fmt: skip
    write(path, "preprocessor_config.json", {"processor_class": "InternVLChatProcessor"})


def write_paddleocr_vl(path: Path) -> None:
    """Multimodal RoPE, a fixed hidden size, and the text model's configuration at the top level."""
    marks = ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"]
    ids = add_tokens(path, marks, "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>")
    write(path, "config.json", TEXT | {
        "model_type": "paddleocr_vl",
        "hidden_size": 1024,
        "vocab_size": max(ids.values()) + 1,
        "head_dim": 32,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [4, 6, 6]},
        "use_bias": False,
        "hidden_act": "silu",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "image_token_id": ids[marks[0]],
        "vision_start_token_id": ids[marks[1]],
        "vision_end_token_id": ids[marks[2]],
        "vision_config": SIGLIP | {"model_type": "paddleocr_vl", "spatial_merge_size": 2},
    })  # fmt: skip
    own = {"processor_class": "PaddleOCRVLProcessor", "patch_size": 14, "merge_size": 2}
    limits = {"min_pixels": 3136, "max_pixels": 12544, "temporal_patch_size": 1}
    write(path, "preprocessor_config.json", PIXELS | own | limits)


def write_dots_ocr(path: Path) -> None:
    """Qwen 2's text model and another tower; the text's configuration is on the top level."""
    pad = "<|imgpad|>"
    ids = add_tokens(path, ["<|img|>", "<|endofimg|>", pad], f"<|img|>{pad}<|endofimg|>")
    write(path, "config.json", TEXT | {
        "model_type": "dots_ocr",
        "hidden_size": 64,
        "vocab_size": ids[pad] + 1,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "image_token_id": ids[pad],
        "eos_token_id": 2,
        "vision_config": {
            "model_type": "dots_vit",
            "embed_dim": 32,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
    })  # fmt: skip
    own = {"processor_class": "DotsVLProcessor", "image_processor_type": "Qwen2VLImageProcessor"}
    limits = {"min_pixels": 3136, "max_pixels": 12544, "temporal_patch_size": 1}
    write(
        path,
        "preprocessor_config.json",
        PIXELS | own | limits | {"patch_size": 14, "merge_size": 2},
    )


def write_kimi_vl(path: Path) -> None:
    """Latent attention, experts, and a tower without a fixed size; a processor without files."""
    marks = ["<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
    ids = add_tokens(path, [*marks, "<|im_assistant|>"], "".join(marks))
    (path / "preprocessor_config.json").unlink()
    write_config(path, ids, {
        "model_type": "kimi_vl",
        "media_placeholder_token_id": ids["<|media_pad|>"],
        "text_config": TEXT | LATENT | EXPERTS | {
            "model_type": "deepseek_v3",
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
        },
        "vision_config": MOONVIT,
    })  # fmt: skip


def write_aya_vision(path: Path) -> None:
    """Cohere 2's windows. The prompt names each tile of an image, followed by its patch tokens."""
    marks = ["<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"]
    tiles = ["TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 5)), "TILE"]
    ids = add_tokens(path, [*marks, *tiles], "<image>")
    write_config(path, ids, {
        "model_type": "aya_vision",
        "image_token_index": ids["<|IMG_PATCH|>"],
        "downsample_factor": 2,
        "alignment_intermediate_size": 64,
        "text_config": TEXT | {
            "model_type": "cohere2",
            "head_dim": 32,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "logit_scale": 1.0,
        },
        "vision_config": SIGLIP | {"model_type": "siglip_vision_model"},
    })  # fmt: skip
    own = {"processor_class": "AyaVisionProcessor", "image_processor_type": "GotOcr2ImageProcessor"}
    sizes = {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 4}
    write(path, "preprocessor_config.json", PIXELS | own | sizes | {"min_patches": 1})
    write(path, "processor_config.json", {
        "processor_class": "AyaVisionProcessor",
        "patch_size": 14,
        "img_size": 56,
        "downsample_factor": 2,
        "image_token": "<image>",
    })  # fmt: skip


def write_llava_next(path: Path) -> None:
    """Tiles at the size nearest to the image; mlx-vlm encodes others than it counts."""
    ids = add_tokens(path, ["<image>"], "<image>")
    write_config(path, ids, {
        "model_type": "llava_next",
        "image_token_index": ids["<image>"],
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 32},
    })  # fmt: skip
    own = {
        "processor_class": "LlavaNextProcessor",
        "image_processor_type": "LlavaNextImageProcessor",
    }
    sizes: dict[str, Any] = {
        "size": {"shortest_edge": 56},
        "crop_size": {"height": 56, "width": 56},
    }
    sizes |= {"do_center_crop": True, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}
    write(path, "preprocessor_config.json", PIXELS | own | sizes)
    write(path, "processor_config.json", {
        "processor_class": "LlavaNextProcessor",
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
    })  # fmt: skip


def write_minicpmo(path: Path) -> None:
    """Images and sounds; the sound's marker belongs to the processor, and is plain text."""
    ids = add_tokens(path, _MINICPM_TOKENS, "<image>")
    text = TEXT | {"model_type": "qwen3", "head_dim": 32}
    text |= {"rope_theta": 10000.0, "tie_word_embeddings": False}
    text["rope_scaling"] = {"rope_type": "default", "type": "default", "mrope_section": [6, 5, 5]}
    hearing = {
        "model_type": "whisper",
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
    }
    write_config(path, ids, {
        "model_type": "minicpmo",
        "query_num": 4,
        "image_size": 56,
        "patch_size": 14,
        "init_vision": True,
        "init_audio": True,
        "init_tts": False,
        "text_config": text,
        "vision_config": SIGLIP | {"model_type": "siglip_vision_model"},
        "audio_config": hearing,
        "audio_pool_step": 5,
    })  # fmt: skip
    write(path, "preprocessor_config.json", {
        "processor_class": "MiniCPMOProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "image_processor_type": "MiniCPMOImageProcessor",
        "patch_size": 14,
        "scale_resolution": 56,
        "image_feature_size": 4,
        "feature_size": 80,
        "sampling_rate": 16000,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
        "padding_value": 0.0,
        "return_attention_mask": True,
    })  # fmt: skip


def _write_weights(path: Path) -> None:
    from mlx_vlm import utils

    read_config: Any = utils.load_config
    config = read_config(path)
    text = config.get("language_config") or config.get("llm_config") or {}
    config.setdefault("text_config", text)
    with opencv_replaced():
        family, _ = utils.get_model_and_args(config)
    settings = family.ModelConfig.from_dict(config)
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    settings = utils.update_module_configs(settings, family, config, parts)
    mx.random.seed(1)
    width = 0.005 if config["model_type"] == "gemma3n" else 0.05  # it scales them
    found = _parameters(family.Model(settings))
    weights = {name: _drawn(name, value, width) for name, value in found}
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})


def _parameters(model: Any) -> list[tuple[str, mx.array]]:
    found: Any = tree_flatten(model.parameters())
    return list(found)


def _drawn(name: str, value: mx.array, embedded: float) -> mx.array:
    """Small for the embeddings, `embedded`, so that the layers decide and not only the last token.

    If they were large, a model whose output layer is its embedding would repeat one token for ever.
    """
    # Factors that are 0 before training: Zaya's of keys, and Gemma 3n's of corrections to layers.
    if name.endswith((".temp", "correct_output_scale")):
        return mx.ones_like(value)
    if name.endswith("perceive.after_rms.weight"):  # HunyuanOCR's, the size of image embeddings
        return mx.full(value.shape, 0.05)
    if value.ndim < 2 or not mx.issubdtype(value.dtype, mx.floating):
        return value
    width = embedded if "embed_tokens" in name else 1.5 / math.sqrt(value.shape[-1])
    return mx.random.normal(value.shape) * width
