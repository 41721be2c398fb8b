"""Small checkpoints of families with multimodal RoPE, in the manner of Qwen's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.vision.checkpoint_files import PIXELS, TEXT, add_tokens, read, write, write_config

_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def write_qwen2_vl(path: Path) -> None:
    """Full attention in the tower, and the text's configuration on the top level."""
    tower = {"embed_dim": 32, "hidden_size": TEXT["hidden_size"], "mlp_ratio": 2}
    _write_flat(path, "qwen2_vl", "Qwen2VLProcessor", tower)


def write_qwen2_5_vl(path: Path) -> None:
    """Windows in the tower, and the text's configuration on the top level."""
    _write_flat(path, "qwen2_5_vl", "Qwen2_5_VLProcessor", {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": TEXT["hidden_size"],
        "window_size": 56,
        "fullatt_block_indexes": [1],
    })  # fmt: skip


def _write_flat(path: Path, family: str, processor: str, tower: dict[str, Any]) -> None:
    base = read(path, "config.json")
    text = {key: base["text_config"][key] for key in (*TEXT, "vocab_size", "eos_token_id")}
    ids = {key: value for key, value in base.items() if key.endswith("_token_id")}
    rope = {"type": "mrope", "mrope_section": [4, 6, 6]}
    tower = {"model_type": family, "depth": 2, "num_heads": 2, "patch_size": 14} | tower
    config = text | ids | {"model_type": family, "rope_scaling": rope, "vision_config": tower}
    write(path, "config.json", config)
    pixels = read(path, "preprocessor_config.json")
    del pixels["size"]
    pixels |= {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12544}
    write(path, "preprocessor_config.json", pixels | {"processor_class": processor})
    (path / "video_preprocessor_config.json").unlink()


def write_qwen3_vl_moe(path: Path) -> None:
    """The small vision model's shape with experts."""
    config = read(path, "config.json") | {"model_type": "qwen3_vl_moe"}
    config["text_config"] |= _EXPERTS | {"model_type": "qwen3_vl_moe_text"}
    config["vision_config"]["model_type"] = "qwen3_vl_moe"
    write(path, "config.json", config)


def write_glm_ocr(path: Path) -> None:
    """Sections of multimodal RoPE one after the other."""
    names = ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>"]
    names += ["<|begin_of_video|>", "<|video|>", "<|end_of_video|>"]
    ids = add_tokens(path, names, "".join(names[:3]))
    size = max(ids.values()) + 1
    text: dict[str, Any] = TEXT | {
        "model_type": "glm_ocr_text",
        "vocab_size": size,
        "head_dim": 32,
        "eos_token_id": [2],
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [4, 6, 6],
            "partial_rotary_factor": 1.0,
            "rope_theta": 10000,
        },
    }
    write_config(path, ids, {
        "model_type": "glm_ocr",
        "image_start_token_id": ids[names[0]],
        "image_token_id": ids[names[1]],
        "image_end_token_id": ids[names[2]],
        "video_start_token_id": ids[names[3]],
        "video_token_id": ids[names[4]],
        "video_end_token_id": ids[names[5]],
        "eos_token_id": [2],
        "text_config": text,
        "vision_config": {
            "model_type": "glm_ocr_vision",
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 14,
            "image_size": 56,
            "out_hidden_size": TEXT["hidden_size"],
        },
    })  # fmt: skip
    own = {"processor_class": "Glm46VProcessor", "patch_size": 14, "temporal_patch_size": 2}
    sizes = {"merge_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 12544}}
    write(path, "preprocessor_config.json", PIXELS | own | sizes)


def write_glm4v(path: Path) -> None:
    """Rotary embedding over half of each head, and weights under GLM's own names."""
    write_glm_ocr(path)
    config = read(path, "config.json") | {"model_type": "glm4v"}
    text = config["text_config"]
    del text["rope_parameters"]
    text |= {
        "model_type": "glm4v_text",
        "rope_theta": 10000,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    config["vision_config"]["model_type"] = "glm4v"
    write(path, "config.json", config)
    pixels = read(path, "preprocessor_config.json")
    kind = {"image_processor_type": "Glm4vImageProcessor", "processor_class": "Glm4vProcessor"}
    write(path, "preprocessor_config.json", pixels | kind)
