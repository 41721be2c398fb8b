"""Everything of the tiny vision checkpoint but its weights: template, tokenizer, configs.

All of it is the text model's, widened: four tokens for pictures, a place for them in the chat
template, and Qwen3-VL's config around the text model's sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.models.tiny_tokenizer import TEMPLATE

TEXT = Path(__file__).parent / "tiny_text"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SECTIONS = [6, 5, 5]
PARTS = """{%- for part in content if part.type == 'text' -%}
            {{- part.text -}}
        {%- endfor -%}"""
_PARTS_WITH_MEDIA = """{%- for part in content -%}
            {%- if part.type == 'text' -%}
                {{- part.text -}}
            {%- elif part.type in ('image', 'image_url') -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type in ('video', 'video_url') -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- endif -%}
        {%- endfor -%}"""


def template() -> str:
    """The chat template of the text model, with a place for each picture."""
    text = TEMPLATE.read_text()
    if PARTS not in text:
        raise ValueError("the text model's template writes the parts of a message in another way")
    return text.replace(PARTS, _PARTS_WITH_MEDIA)


def config() -> dict[str, Any]:
    """Qwen3-VL's configuration, with the sizes of the text model."""
    text = json.loads((TEXT / "config.json").read_text())
    ends = {name: text[name] for name in ("eos_token_id", "pad_token_id")}
    first: int = text["vocab_size"]
    size = first + len(VISION_TOKENS)
    drop = {"architectures", "torch_dtype", "bos_token_id"}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {name: value for name, value in text.items() if name not in drop}
        | {
            "model_type": "qwen3_vl_text",
            "vocab_size": size,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": SECTIONS,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": text["hidden_size"],
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        "vision_start_token_id": first,
        "vision_end_token_id": first + 1,
        "image_token_id": first + 2,
        "video_token_id": first + 3,
        "vocab_size": size,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **ends,
    }


def write_processor(directory: Path) -> None:
    """Everything but the weights: tokenizer, template, configs."""
    image: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64},
    }
    video = image | {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "fps": 2,
        "min_frames": 2,
        "max_frames": 16,
        "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 8 * 64 * 64},
    }
    contents = {
        "config": config(),
        "preprocessor_config": image,
        "video_preprocessor_config": video,
    }
    write_files(directory, VISION_TOKENS, contents)
    (directory / "chat_template.jinja").write_text(template())


def write_files(directory: Path, tokens: Sequence[str], contents: Mapping[str, Any]) -> None:
    """The text model's tokenizer with further control tokens, and JSON files by their stems."""
    tokenizer = Tokenizer.from_file(str(TEXT / "tokenizer.json"))
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = json.loads((TEXT / "tokenizer_config.json").read_text())
    tokenizer_config["extra_special_tokens"] += tokens
    of_text = {
        "tokenizer_config": tokenizer_config,
        "generation_config": json.loads((TEXT / "generation_config.json").read_text()),
    }
    for name, content in {**of_text, **contents}.items():
        (directory / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
