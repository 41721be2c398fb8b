"""Small checkpoints of less common families: LLaVA, and those that combine known parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.architectures.shapes import configuration
from tests.architectures.vlm_shapes import text_arguments
from tests.engine.vision.checkpoint_files import (
    EXPERTS,
    LATENT,
    PIXELS,
    SIGLIP,
    TEXT,
    add_tokens,
    read,
    write,
    write_config,
)
from tests.engine.vision.llava_families import write_pixtral

_ROPE = {"rope_theta": 10000.0}
_PATCHES = PIXELS | {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12544}


def write_llava(path: Path) -> None:
    """LLaVA 1.5: one size of images, and a token for each patch."""
    ids = add_tokens(path, ["<image>"], "<image>\\n")
    write_config(path, ids, {
        "model_type": "llava",
        "image_token_index": ids["<image>"],
        "text_config": TEXT | _ROPE | {"model_type": "llama"},
        "vision_config": SIGLIP | {"model_type": "clip_vision_model"},
    })  # fmt: skip
    kind = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}}
    crop = {"do_center_crop": True, "crop_size": {"height": 56, "width": 56}}
    write(path, "preprocessor_config.json", PIXELS | kind | crop)
    write(path, "processor_config.json", {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
    })  # fmt: skip


def write_paligemma(path: Path) -> None:
    """An image before the prompt, no roles, and attention in both directions within the prompt."""
    _write_paligemma(path, {"model_type": "gemma", "head_dim": 32})


def write_paligemma2(path: Path) -> None:
    """PaliGemma with Gemma 2, which computes its attention in other steps."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    _write_paligemma(
        path, caps | {"model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 32}
    )


def _write_paligemma(path: Path, text: dict[str, Any]) -> None:
    ids = add_tokens(path, ["<image>", "<bos>"], "")
    (path / "chat_template.jinja").unlink()
    tokens = read(path, "tokenizer_config.json")
    write(path, "tokenizer_config.json", tokens | {"bos_token": "<bos>"})
    size = max(ids.values()) + 1
    write_config(path, ids, {
        "model_type": "paligemma",
        "image_token_index": ids["<image>"],
        "hidden_size": TEXT["hidden_size"],
        "projection_dim": TEXT["hidden_size"],
        "pad_token_id": 0,
        "text_config": TEXT | _ROPE | text | {"vocab_size": size},
        "vision_config": SIGLIP | {
            "model_type": "siglip_vision_model",
            "projection_dim": TEXT["hidden_size"],
        },
    })  # fmt: skip
    kind = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 56, "width": 56}}
    write(path, "preprocessor_config.json", PIXELS | kind | {"image_seq_length": 16})


def write_got(path: Path) -> None:
    """A processor that writes a whole prompt around an image, and no template."""
    marks = ["<img>", "<imgpad>", "</img>"]
    ids = add_tokens(path, marks, "")
    (path / "chat_template.jinja").unlink()
    (path / "preprocessor_config.json").unlink()
    size = max(ids.values()) + 1
    write(path, "config.json", TEXT | _ROPE | {
        "model_type": "GOT",
        "vocab_size": size,
        "im_start_token": ids["<img>"],
        "im_patch_token": ids["<imgpad>"],
        "im_end_token": ids["</img>"],
        "eos_token_id": 2,
        "vision_config": {
            "embed_dim": 16,
            "depth": 2,
            "num_heads": 2,
            "out_chans": 16,
            "out_dim": 64,
            "global_attn_indexes": [1],
        },
    })  # fmt: skip


def write_molmo(path: Path) -> None:
    """A processor that writes an image before the whole prompt, and no marker in the template."""
    marks = ["<im_start>", "<im_end>", "<im_patch>", "<im_col>"]
    ids = add_tokens(path, marks, "")
    first = min(ids.values())
    write(path, "config.json", {
        "model_type": "molmo",
        "eos_token_id": 2,
        "text_config": {
            "model_type": "molmo",
            "d_model": 128,
            "n_heads": 4,
            "n_kv_heads": 2,
            "n_layers": 4,
            "mlp_hidden_size": 256,
            "vocab_size": first,
            "embedding_size": first,
            "additional_vocab_size": len(marks),
        },
        "vision_config": {
            "model_type": "molmo",
            "image_default_input_size": [112, 112],
            "hidden_size": 256,
            "image_emb_dim": 32,
            "image_num_heads": 2,
            "image_num_key_value_heads": 2,
            "image_num_layers": 3,
            "image_head_dim": 16,
            "image_mlp_dim": 64,
            "image_num_pos": 65,
            "d_model": 128,
            "vit_layers": [-1, -3],
        },
    })  # fmt: skip
    write(path, "preprocessor_config.json", {
        "processor_class": "MolmoProcessor",
        "max_crops": 2,
        "overlap_margins": [2, 2],
        "base_image_input_size": [112, 112],
        "image_token_length_w": 4,
        "image_token_length_h": 4,
    })  # fmt: skip


_HUNYUAN_IDS = {
    "IM_START_TOKEN_ID": "<img>",
    "IMAGE_TOKEN_ID": "<image>",
    "IM_END_TOKEN_ID": "</img>",
    "PAD_TOKEN_ID": "<pad>",
}


def write_hunyuan_vl(path: Path) -> None:
    """Positions on four axes, of which three count an image's rows and columns from 0."""
    ids = add_tokens(path, list(_HUNYUAN_IDS.values()), "<img><image></img>")
    rope = {"type": "xdrope", "alpha": 10.0, "factor": 1.0, "xdrope_section": [4, 4, 4, 4]}
    write_config(path, ids, {
        "model_type": "hunyuan_vl",
        "image_token_id": ids["<image>"],
        "image_start_token_id": ids["<img>"],
        "image_end_token_id": ids["</img>"],
        "text_config": TEXT | _ROPE | {
            "model_type": "hunyuan_vl",
            "head_dim": 32,
            "rope_scaling": rope,
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": "hunyuan_vl",
            "hidden_size": 32,
            "out_hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_image_size": 512,
        },
    })  # fmt: skip
    write(path, "preprocessor_config.json", {"processor_class": "HunYuanVLProcessor"})


def write_ernie4_5_moe_vl(path: Path) -> None:
    """Experts of their own for the tokens of images."""
    marks = ["<|IMAGE_START|>", "<|image@placeholder|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>"]
    ids = add_tokens(path, marks, "".join(marks[:3]))
    size = max(ids.values()) + 1
    write(path, "config.json", TEXT | _ROPE | {
        "model_type": "ernie4_5_moe_vl",
        "vocab_size": size,
        "im_patch_id": ids["<|IMAGE_PLACEHOLDER|>"],
        "video_token_id": ids["<|IMAGE_PLACEHOLDER|>"],
        "image_start_token_id": ids["<|IMAGE_START|>"],
        "image_end_token_id": ids["<|IMAGE_END|>"],
        "eos_token_id": 2,
        "moe_num_experts": [4, 4],
        "moe_intermediate_size": [64, 32],
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
        "rope_scaling": {"mrope_section": [6, 6, 4]},
        "pixel_hidden_size": 32,
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2},
    })  # fmt: skip
    write(path, "preprocessor_config.json", {"processor_class": "Ernie4_5_VLProcessor"})


def own_tokens(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Replace the ids of control tokens, or a tokenizer, that mlx-vlm fixes in its code."""
    ids = {token["content"]: token["id"] for token in read(path, "tokenizer.json")["added_tokens"]}
    match read(path, "config.json")["model_type"]:
        case "ernie4_5_moe_vl":
            from mlx_vlm.models.ernie4_5_moe_vl import processing_ernie4_5_moe_vl as ernie
            from transformers import AutoTokenizer

            opened = AutoTokenizer.from_pretrained
            patch.setattr(ernie.Ernie4_5_VLTokenizer, "from_pretrained", opened)
        case "hunyuan_vl":
            from mlx_vlm.models.hunyuan_vl.processing_hunyuan_vl import HunYuanVLProcessor

            for name, text in _HUNYUAN_IDS.items():
                patch.setattr(HunYuanVLProcessor, name, ids[text])
        case "jvlm":
            from mlx_vlm.models.jina_vlm.image_processor import ImageProcessor

            begun: Any = ImageProcessor.__init__
            own = (*begun.__defaults__[: -len(_JINA_MARKS)], *(ids[one] for one in _JINA_MARKS))
            patch.setattr(begun, "__defaults__", own)


def write_zaya1_vl(path: Path) -> None:
    """Convolutions beside the KV, and weights of their own (LoRA) for the tokens of images."""
    ids = add_tokens(path, ["<image>"], "<image>")
    write_config(path, ids, {
        "model_type": "zaya1_vl",
        "image_token_id": ids["<image>"],
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "ffn_hidden_size": 128,
        "num_experts": 4,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "zaya_mlp_expansion": 32,
        "vision_config": _tower() | {"out_hidden_size": 128},
    })  # fmt: skip
    write(path, "preprocessor_config.json", _PATCHES | {"processor_class": "Zaya1VLProcessor"})


def write_mage_vl(path: Path) -> None:
    """Qwen 3's text model beside a tower that knows the place and time of each patch."""
    base = read(path, "config.json")
    ids = {key: value for key, value in base.items() if key.endswith("_token_id")}
    size = base["text_config"]["vocab_size"]
    write(path, "config.json", ids | {
        "model_type": "mage_vl",
        "eos_token_id": [2],
        "text_config": TEXT | {
            "model_type": "qwen3",
            "vocab_size": size,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "vision_config": {
            "model_type": "mage_vl_vision",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "intermediate_size": 64,
            "patch_size": 14,
            "image_size": 56,
            "out_hidden_size": 128,
            "text_hidden_size": 128,
        },
    })  # fmt: skip
    own = {"processor_class": "MageVLProcessor", "temporal_patch_size": 1}
    write(path, "preprocessor_config.json", _PATCHES | own)
    (path / "video_preprocessor_config.json").unlink()


def write_internvl(path: Path) -> None:
    """InternVL in the form of transformers, with a marker of its own."""
    ids = add_tokens(path, ["<img>", "</img>", "<IMG_CONTEXT>"], "<IMG_CONTEXT>\\n")
    write_config(path, ids, {
        "model_type": "internvl",
        "image_token_id": ids["<IMG_CONTEXT>"],
        "downsample_ratio": 0.5,
        "max_dynamic_patch": 2,
        "text_config": TEXT | _ROPE | {
            "model_type": "qwen3",
            "head_dim": 32,
            "tie_word_embeddings": False,
        },
        "vision_config": SIGLIP | {
            "model_type": "internvl_vision",
            "image_size": [56, 56],
            "patch_size": [14, 14],
        },
    })  # fmt: skip
    own = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    write(path, "processor_config.json", own)
    write(path, "preprocessor_config.json", own)


def write_cohere_compass(path: Path) -> None:
    """Features of the tower that are added to several layers, beside sliding windows."""
    marks = ["<|VISION_START|>", "<|IMAGE_PAD|>", "<|VISION_END|>"]
    ids = add_tokens(path, marks, "".join(marks))
    write_config(path, ids, {
        "model_type": "cohere_compass",
        "image_token_id": ids[marks[1]],
        "vision_start_token_id": ids[marks[0]],
        "vision_end_token_id": ids[marks[2]],
        "min_pixels": 3136,
        "max_pixels": 12544,
        "text_config": TEXT | {
            "model_type": "cohere_compass_text",
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": _ROPE | {"rope_type": "default"},
        },
        "vision_config": {
            "model_type": "cohere_compass_vision",
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 14,
            "out_hidden_size": 128,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    })  # fmt: skip
    write(
        path, "preprocessor_config.json", _PATCHES | {"processor_class": "CohereCompassProcessor"}
    )


def write_muse_glimmer(path: Path) -> None:
    """Norms on embeddings and logits, and layers without positions."""
    marks = ["<|image_start|>", "<|patch|>", "<|image_end|>", "<|video|>"]
    ids = add_tokens(path, marks, "<|patch|>")
    write_config(path, ids, {
        "model_type": "muse_glimmer",
        "image_token_id": ids["<|patch|>"],
        "video_token_id": ids["<|video|>"],
        "out_hidden_size": 128,
        "projector_hidden_size": 64,
        "eos_token_id": [2],
        "text_config": TEXT | {
            "model_type": "muse_glimmer_text",
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "vision_config": {
            "model_type": "muse_glimmer_vision",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
        },
    })  # fmt: skip
    own = {"processor_class": "MuseGlimmerProcessor", "max_image_tokens": 16}
    write(path, "preprocessor_config.json", _PATCHES | own)


def write_glm5_next(path: Path) -> None:
    """Linear attention beside sparse attention, and streams of hidden states that are mixed."""
    marks = ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>"]
    other = ["<|begin_of_video|>", "<|video|>", "<|end_of_video|>"]
    ids = add_tokens(path, [*marks, *other], "".join(marks))
    text = text_arguments("glm5_next") | {"vocab_size": max(ids.values()) + 1}
    (path / "preprocessor_config.json").unlink()
    write(path, "config.json", {
        "model_type": "glm5_next",
        "image_start_token_id": ids[marks[0]],
        "image_token_id": ids[marks[1]],
        "image_end_token_id": ids[marks[2]],
        "video_start_token_id": ids[other[0]],
        "video_token_id": ids[other[1]],
        "video_end_token_id": ids[other[2]],
        "eos_token_id": 2,
        "text_config": text,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "image_size": 56,
            "out_hidden_size": text["hidden_size"],
            "intermediate_size": 64,
            "projection_intermediate_size": 64,
        },
    })  # fmt: skip
    images = {"patch_size": 14, "merge_size": 2, "min_image_tokens": 2, "max_image_tokens": 8}
    own = {"processor_class": "Glm5NextProcessor", "image_processor": images}
    write(path, "processor_config.json", own | {"video_processor": images})


def write_step3p7(path: Path) -> None:
    """Sliding windows with other head counts, and 169 tokens for each image."""
    marks = ["<im_start>", "<im_patch>", "<im_end>", "<patch_start>", "<patch_end>"]
    ids = add_tokens(path, [*marks, "<patch_newline>"], "<im_patch>")
    size = max(ids.values()) + 1
    tower = {"width": 32, "layers": 2, "heads": 2, "mlp_ratio": 2.0}
    write_config(path, ids, {
        "model_type": "step3p7",
        "image_token_id": ids["<im_patch>"],
        "text_config": text_arguments("step3p7") | {"vocab_size": size},
        "vision_config": tower,
    })  # fmt: skip
    write(path, "preprocessor_config.json", {"processor_class": "Step3VLProcessor"})


def write_mimo_v2(path: Path) -> None:
    """Sliding windows with sinks, in the text and in the tower."""
    base = read(path, "config.json")
    ids = {key: value for key, value in base.items() if key.endswith("_token_id")}
    size = base["text_config"]["vocab_size"]
    text = text_arguments("mimo_v2") | {"vocab_size": size}
    speech = {
        "out_hidden_size": text["hidden_size"],
        "audio_channels": 2,
        "input_local_attn_heads": 2,
        "input_local_dim": 32,
        "input_local_head_dim": 16,
        "input_local_intermediate_size": 64,
        "input_local_layers": 1,
        "speech_vocab_size": 32,
        "speech_zeroemb_idx": 31,
    }
    write(path, "config.json", ids | text | {
        "model_type": "mimo_v2",
        "eos_token_id": 2,
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": text["hidden_size"],
            "num_heads": 4,
            "num_key_value_heads": 2,
            "qk_channels": 16,
            "patch_size": 14,
            "fullatt_block_indexes": [0],
            "vit_window_attn_types": [-1, 0, 1],
            "visual_token_window_size": 4,
        },
        "audio_config": speech,
    })  # fmt: skip
    write(path, "preprocessor_config.json", _PATCHES | {"processor_class": "MiMoV2Processor"})
    (path / "video_preprocessor_config.json").unlink()


def write_inkling(path: Path) -> None:
    """Convolutions and relative positions in the text, and a tower without attention."""
    image, sound = "<|unused_200054|>", "<|unused_200053|>"
    marks = [image, "<|content_image|>", sound, "<|content_audio_input|>"]
    ids = add_tokens(path, marks, f"<|content_image|>{image}")
    size = max(ids.values()) + 1
    template = path / "chat_template.jinja"
    images = "{%- elif part.type in ('image', 'image_url') -%}"
    sounds = f"{{%- elif part.type == 'audio' -%}}<|content_audio_input|>{sound}\n"
    template.write_text(template.read_text().replace(images, sounds + images))
    write_config(path, ids, {
        "model_type": "inkling",
        "image_token_id": ids[image],
        "audio_token_id": ids[sound],
        "eos_token_id": [2],
        "text_config": text_arguments("inkling") | {"vocab_size": size},
        "vision_config": {"model_type": "inkling_vision"},
        "audio_config": {"model_type": "inkling_audio"},
    })  # fmt: skip
    write(path, "preprocessor_config.json", {"processor_class": "InklingProcessor"})


def write_locateanything(path: Path) -> None:
    """Kimi VL's tower beside Qwen 2's text model."""
    ids = add_tokens(path, ["<img>", "<IMG_CONTEXT>", "</img>"], "")
    write_config(path, ids, {
        "model_type": "locateanything",
        "image_token_index": ids["<IMG_CONTEXT>"],
        "eos_token_id": [2],
        "text_config": TEXT | _ROPE | {"model_type": "qwen2"},
        "vision_config": {
            "model_type": "moonvit",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
        },
    })  # fmt: skip
    own = {"processor_class": "LocateAnythingProcessor", "in_token_limit": 64}
    write(path, "preprocessor_config.json", PIXELS | own | {"patch_size": 14})


def write_nemotron_h_nano_omni(path: Path) -> None:
    """Mamba layers in the text, and a tower for images of any size."""
    ids = add_tokens(path, ["<img>", "<image>", "</img>", "<video>"], "<image>")
    size = max(ids.values()) + 1
    write_config(path, ids, {
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
        "img_context_token_id": ids["<image>"],
        "video_context_token_id": ids["<video>"],
        "vit_hidden_size": 32,
        "projector_hidden_size": 64,
        "llm_config": configuration("nemotron_h") | {"vocab_size": size},
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 64,
            "max_resolution": 128,
            "min_num_patches": 4,
            "max_num_patches": 32,
        },
    })  # fmt: skip
    limits = {"patch_size": 16, "min_num_patches": 4, "max_num_patches": 32}
    norm = {"norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.5, 0.5, 0.5]}
    own = {"processor_class": "NemotronHNanoOmniProcessor"}
    write(path, "preprocessor_config.json", own | limits | norm)
    write(path, "processor_config.json", own)


def write_kimi_k3(path: Path) -> None:
    """Linear attention beside latent attention; each image follows a text with its size."""
    marks = ["<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
    marks += ["<|kimi_image_placeholder|>"]
    ids = add_tokens(path, marks, "<|kimi_image_placeholder|>")
    text = configuration("kimi_k3")["text_config"] | {"vocab_size": max(ids.values()) + 1}
    write_config(path, ids, {
        "model_type": "kimi_k3",
        "media_placeholder_token_id": ids["<|media_pad|>"],
        "eos_token_id": [2],
        "text_config": text | {"num_key_value_heads": 4},
        "vision_config": {
            "model_type": "moonvit3d",
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "vt_num_attention_heads": 2,
            "vt_num_hidden_layers": 2,
            "vt_hidden_size": 32,
            "vt_intermediate_size": 64,
            "qkv_hidden_size": 32,
            "mm_hidden_size": 32,
            "text_hidden_size": text["hidden_size"],
        },
    })  # fmt: skip
    write(path, "preprocessor_config.json", {
        "processor_class": "KimiK3Processor",
        "media_proc_cfg": {"patch_size": 14, "merge_kernel_size": [2, 2], "in_patch_limit": 64},
    })  # fmt: skip


def write_mistral_large3(path: Path) -> None:
    """Pixtral's tower beside latent attention and experts."""
    write_pixtral(path)
    config = read(path, "config.json") | {"model_type": "mistral_large3", "spatial_merge_size": 1}
    ids = {token["content"]: token["id"] for token in read(path, "tokenizer.json")["added_tokens"]}
    size = max(ids.values()) + 1
    config["image_token_id"] = ids["[IMG]"]
    kind = {"model_type": "mistral_large3", "vocab_size": size}
    config["text_config"] = TEXT | LATENT | EXPERTS | _ROPE | kind
    del config["text_config"]["n_shared_experts"]
    write(path, "config.json", config)


def write_llmjpvl(path: Path) -> None:
    """A processor that only the checkpoint's own code has."""
    ids = add_tokens(path, ["<image>"], "<image>")
    (path / "preprocessor_config.json").unlink()
    write_config(path, ids, {
        "model_type": "llmjpvl",
        "img_context_token_id": ids["<image>"],
        "eos_token_id": [2],
        "text_config": TEXT | _ROPE | {"model_type": "llama"},
        "vision_config": SIGLIP | {"model_type": "siglip_vision_model"},
    })  # fmt: skip
    kind = {"processor_class": "LLMJPVLProcessor", "image_processor_type": "LLMJPVLImageProcessor"}
    own = {"auto_map": {"AutoProcessor": "processing_llmjpvl.LLMJPVLProcessor"}}
    write(path, "preprocessor_config.json", kind | own)


_JINA_MARKS = ["<im_patch>", "<im_start>", "<im_end>", "<im_col>"]


def write_jina_vlm(path: Path) -> None:
    """Overlapping crops of an image, and embeddings in two parts."""
    ids = add_tokens(path, [*_JINA_MARKS, "<|image|>"], "<|image|>")
    vocabulary = {"vocab_size": min(ids.values()), "additional_vocab_size": len(ids)}
    text = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    tower = {"num_hidden_layers": 4, "num_attention_heads": 2, "connector_hidden_size": 64}
    # mlx-vlm reads both these names and its own.
    write(path, "config.json", {
        "model_type": "jvlm",
        "image_token_index": ids["<|image|>"],
        "eos_token_id": 2,
        "text_config": text | vocabulary | {
            "hidden_size": 64,
            "head_dim": 16,
            "intermediate_size": 128,
        },
        "vision_config": tower | {
            "hidden_size": 32,
            "head_dim": 16,
            "intermediate_size": 64,
            "vit_layers": [-2, -4],
            "output_size": 64,
        },
    })  # fmt: skip
    write(path, "preprocessor_config.json", {"processor_class": "JinaVLMProcessor"})


def _tower() -> dict[str, object]:
    return {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }


_GEMMA3N_TOKENS = {
    "boi_token": "<start_of_image>",
    "boa_token": "<start_of_audio>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
    "eoa_token": "<audio_end>",
    "audio_token": "<audio_soft_token>",
}


def write_gemma3n(path: Path) -> None:
    """Layers without KV of their own, and tokens of images and sounds beyond those of text."""
    image, sound = _GEMMA3N_TOKENS["image_token"], _GEMMA3N_TOKENS["audio_token"]
    ids = add_tokens(path, list(_GEMMA3N_TOKENS.values()), image)
    template = path / "chat_template.jinja"
    written = template.read_text()
    shown = f"{{{{- '{image}' -}}}}"
    heard_too = f"{{%- elif part.type == 'audio' -%}}{{{{- '{sound}' -}}}}"
    assert shown in written
    template.write_text(written.replace(shown, shown + heard_too))
    named = {f"{name}_id": ids[text] for name, text in _GEMMA3N_TOKENS.items()}
    tokens = read(path, "tokenizer_config.json")
    write(path, "tokenizer_config.json", tokens | named | {
        "extra_special_tokens": _GEMMA3N_TOKENS
    })  # fmt: skip
    size, seen, audio_end = max(ids.values()) + 1, named["eoi_token_id"], named["eoa_token_id"]
    write(path, "config.json", {
        "model_type": "gemma3n",
        "vocab_size": size,
        "hidden_size": TEXT["hidden_size"],
        "image_token_id": named["image_token_id"],
        "audio_token_id": named["audio_token_id"],
        "vision_soft_tokens_per_image": 4,
        "audio_soft_tokens_per_image": 13,
        "eos_token_id": 2,
        "text_config": TEXT | {
            "model_type": "gemma3n_text",
            "vocab_size": size,
            "vocab_size_per_layer_input": seen,
            "intermediate_size": [256] * 4,
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", *["full_attention"] * 3],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "altup_num_inputs": 3,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "final_logit_softcapping": 30.0,
        },
        "vision_config": {"hidden_size": 32, "vocab_offset": seen, "vocab_size": audio_end - seen},
        "audio_config": {
            "hidden_size": 32,
            "input_feat_size": 32,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": [8, 4],
            "vocab_offset": audio_end,
            "vocab_size": size - audio_end,
        },
    })  # fmt: skip
    own = {
        "processor_class": "Gemma3nProcessor",
        "image_seq_length": 4,
        "audio_seq_length": 13,
    }
    write(path, "preprocessor_config.json", PIXELS | own | {
        "image_processor_type": "SiglipImageProcessorFast",
        "size": {"height": 56, "width": 56},
        "feature_extractor_type": "Gemma3nAudioFeatureExtractor",
        "feature_size": 32,
        "sampling_rate": 16000,
        "padding_value": 0.0,
        "frame_length_ms": 32.0,
        "hop_length_ms": 10.0,
    })  # fmt: skip
    write(path, "processor_config.json", own)


def small_pyramid(patch: pytest.MonkeyPatch) -> None:
    """mlx-vlm fixes the size of Gemma 3n's tower in its code; this one makes 4 embeddings."""
    from mlx_vlm.models.gemma3n import vision

    nn: Any = vision.nn

    class Tower(nn.Module):  # type: ignore[misc]  # mlx.nn is untyped
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, config.hidden_size, 28, 28)

        def __call__(self, x: Any, _: Any = None) -> Any:
            return self.conv(x.transpose(0, 2, 3, 1))

    patch.setattr(vision, "VisionTower", Tower)
    patch.setattr(vision.VisionModel, "sanitize", lambda _, weights: weights)
