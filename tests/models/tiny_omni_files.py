"""Everything of the tiny omni checkpoint but its weights: template, tokenizer, configs.

All of it is the text model's, widened: MiniCPM-o's tokens for what is between the words, a place
in the chat template for images and sounds, and its config around the text model's sizes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.models.tiny_tokenizer import TEMPLATE
from tests.models.tiny_vision_files import PARTS, SECTIONS, TEXT, write_files

# All tokens that mlx-vlm's processor looks up: a missing one would become the unknown token.
OMNI_TOKENS = (
    "<image>",
    "</image>",
    "<slice>",
    "</slice>",
    "<unk>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|spk_bos|>",
    "<|spk_eos|>",
    "<|tts_bos|>",
    "<|tts_eos|>",
    "<|listen|>",
)
IMAGE_MARKER, AUDIO_MARKER = "<image>./</image>", "<audio>./</audio>"
IMAGE_TOKENS = 4
_PARTS_WITH_MEDIA = f"""{{%- for part in content -%}}
            {{%- if part.type == 'text' -%}}
                {{{{- part.text -}}}}
            {{%- elif part.type in ('image', 'image_url') -%}}
                {{{{- '{IMAGE_MARKER}' -}}}}
            {{%- elif part.type in ('audio', 'input_audio') -%}}
                {{{{- '{AUDIO_MARKER}' -}}}}
            {{%- endif -%}}
        {{%- endfor -%}}"""
_SIDE, _PATCH = 56, 14


def template() -> str:
    """The chat template of the text model, with a place for each image and sound."""
    text = TEMPLATE.read_text()
    if PARTS not in text:
        raise ValueError("the text model's template writes the parts of a message in another way")
    return text.replace(PARTS, _PARTS_WITH_MEDIA)


def config() -> dict[str, Any]:
    """MiniCPM-o around the text model's sizes."""
    text = json.loads((TEXT / "config.json").read_text())
    ends = {name: text[name] for name in ("eos_token_id", "pad_token_id")}
    size = text["vocab_size"] + len(OMNI_TOKENS)
    drop = {"architectures", "torch_dtype", "bos_token_id"}
    rope = {"rope_type": "default", "type": "default", "mrope_section": SECTIONS}
    return {
        "architectures": ["MiniCPMO"],
        "model_type": "minicpmo",
        "text_config": {name: value for name, value in text.items() if name not in drop}
        | {"vocab_size": size, "rope_scaling": rope},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": _SIDE,
            "patch_size": _PATCH,
        },
        "audio_config": {
            "model_type": "whisper",
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "num_mel_bins": 80,
            "max_source_positions": 1500,
        },
        "audio_pool_step": 5,
        "query_num": IMAGE_TOKENS,
        "image_size": _SIDE,
        "patch_size": _PATCH,
        "init_vision": True,
        "init_audio": True,
        "init_tts": False,
        "vocab_size": size,
        "torch_dtype": "bfloat16",
        **ends,
    }


def write_processor(directory: Path) -> None:
    """Everything but the weights: tokenizer, template, configs."""
    preprocessor = {
        "processor_class": "MiniCPMOProcessor",
        "image_processor_type": "MiniCPMOImageProcessor",
        "patch_size": _PATCH,
        "scale_resolution": _SIDE,
        "image_feature_size": IMAGE_TOKENS,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 80,
        "sampling_rate": 16000,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
        "padding_value": 0.0,
        "return_attention_mask": True,
    }
    contents = {
        "config": config(),
        "preprocessor_config": preprocessor,
    }
    write_files(directory, OMNI_TOKENS, contents)
    (directory / "chat_template.jinja").write_text(template())
