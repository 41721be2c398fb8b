"""Small checkpoints of families that put the encoder's output in the place of image tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.vision.checkpoint_files import (
    PIXELS,
    QWEN_MARKER,
    SIGLIP,
    TEXT,
    add_tokens,
    read,
    write,
    write_config,
)

_ROPE = {"rope_theta": 10000.0}


def _plain_marker(path: Path) -> int:
    """Remove the image marker from the template; returns the size of the vocabulary."""
    template = path / "chat_template.jinja"
    template.write_text(template.read_text().replace(QWEN_MARKER, ""))
    (path / "video_preprocessor_config.json").unlink()
    text: dict[str, Any] = read(path, "config.json")["text_config"]
    return int(text["vocab_size"])


def write_phi4_siglip(path: Path) -> None:
    """A processor that transformers builds only where PyTorch is installed."""
    size = _plain_marker(path)
    text = TEXT | _ROPE | {"model_type": "phi4-siglip", "vocab_size": size}
    length = text.pop("max_position_embeddings")
    write(path, "config.json", text | {
        "max_position_embeddings": length,
        "eos_token_id": 2,
        "text_config": text,
        "mm_vision_tower": "siglip2-naflex-patch14",
        "mm_hidden_size": 32,
        "vision_config": SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 16},
    })  # fmt: skip
    (path / "preprocessor_config.json").unlink()


def write_llava_bunny(path: Path) -> None:
    """One token, outside the vocabulary, for a whole image; the template has no place for it."""
    size = _plain_marker(path)
    write(path, "config.json", TEXT | _ROPE | {
        "model_type": "llava-qwen2",
        "auto_map": {},
        "vocab_size": size,
        "eos_token_id": 2,
        "mm_vision_tower": "siglip",
        "mm_hidden_size": 32,
        "tie_word_embeddings": False,
        "vision_config": SIGLIP | {"model_type": "siglip_vision_model", "image_size": 384},
    })  # fmt: skip
    write(path, "preprocessor_config.json", {"image_processor_type": "SiglipImageProcessor"})


def write_llava_onevision(path: Path) -> None:
    """Tiles with a line feed embedding after each row of patches."""
    ids = add_tokens(path, ["<image>", "<video>"], "<image>")
    grids = [[56, 56], [56, 112], [112, 56], [112, 112]]
    write_config(path, ids, {
        "model_type": "llava_onevision",
        "image_token_index": ids["<image>"],
        "video_token_index": ids["<video>"],
        "image_grid_pinpoints": grids,
        "vision_aspect_ratio": "anyres_max_9",
        "text_config": TEXT | _ROPE | {"model_type": "qwen2"},
        "vision_config": SIGLIP | {"model_type": "siglip_vision_model"},
    })  # fmt: skip
    own = {
        "processor_class": "LlavaOnevisionProcessor",
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "image_grid_pinpoints": grids,
        "size": {"height": 56, "width": 56},
    }
    write(path, "preprocessor_config.json", PIXELS | own)
    write(path, "processor_config.json", {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
        "image_token": "<image>",
        "video_token": "<video>",
    })  # fmt: skip


def write_pixtral(path: Path) -> None:
    """Rows of an image of any size, with breaks between them."""
    ids = add_tokens(path, ["[IMG]", "[IMG_BREAK]", "[IMG_END]"], "[IMG]")
    write_config(path, ids, {
        "model_type": "pixtral",
        "image_token_index": ids["[IMG]"],
        "text_config": TEXT | _ROPE | {"model_type": "mistral", "head_dim": 32},
        "vision_config": SIGLIP | {"model_type": "pixtral", "head_dim": 16},
    })  # fmt: skip
    own = {"processor_class": "PixtralProcessor", "patch_size": 14}
    write(path, "processor_config.json", own)
    kind = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 56}}
    write(path, "preprocessor_config.json", PIXELS | kind | {"patch_size": 14})


def write_lfm2_vl(path: Path) -> None:
    """Convolutions beside attention, and an image of as many patches as its shape asks for."""
    marks = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
    marks += [f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4)]
    ids = add_tokens(path, marks, "<image>")
    write_config(path, ids, {
        "model_type": "lfm2-vl",
        "image_token_id": ids["<image>"],
        "downsample_factor": 2,
        "encoder_patch_size": 14,
        "projector_hidden_size": 64,
        "text_config": TEXT | {
            "model_type": "lfm2",
            "block_dim": 128,
            "block_ff_dim": 128,
            "block_multiple_of": 16,
            "conv_dim": 128,
            "conv_dim_out": 128,
            "num_heads": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "rope_theta": 10000.0,
            "eos_token_id": 2,
        },
        "vision_config": SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 16},
    })  # fmt: skip
    sizes = {
        "encoder_patch_size": 14,
        "tile_size": 56,
        "min_image_tokens": 1,
        "max_image_tokens": 8,
        "min_tiles": 2,
        "max_tiles": 4,
        "max_num_patches": 32,
        "downsample_factor": 2,
    }
    own = {"processor_class": "Lfm2VlProcessor", "image_processor_type": "Lfm2VlImageProcessor"}
    write(path, "preprocessor_config.json", PIXELS | own | sizes)
