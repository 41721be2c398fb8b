"""Small checkpoints of families with image and sound input, in their own file format."""

from __future__ import annotations

from pathlib import Path

from tests.engine.vision.checkpoint_files import QWEN_MARKER, TEXT, add_tokens, read, write

_MARKS = {
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_token": "<|audio_pad|>",
    "audio_eos_token": "<|audio_end|>",
}
_WHISPER = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "padding_value": 0.0,
    "return_attention_mask": True,
}


def write_qwen3_omni_moe(path: Path) -> None:
    """The language model is a part of its own, and layers add features to each image token."""
    base = read(path, "config.json")
    video = (path / "video_preprocessor_config.json").read_text()
    sounds = [text for name, text in _MARKS.items() if name.startswith("audio")]
    added = add_tokens(path, sounds, QWEN_MARKER)
    (path / "video_preprocessor_config.json").write_text(video)
    _hear(path, "".join(sounds))
    tokens = read(path, "tokenizer_config.json") | {"extra_special_tokens": _MARKS}
    write(path, "tokenizer_config.json", tokens)
    pixels = read(path, "preprocessor_config.json") | _WHISPER
    write(path, "preprocessor_config.json", pixels | {"processor_class": "Qwen3OmniMoeProcessor"})
    opening, closing, sound = (added[text] for text in (sounds[0], sounds[2], sounds[1]))
    text = TEXT | {
        "vocab_size": max(added.values()) + 1,
        "head_dim": 32,
        "rope_theta": 10000.0,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]},
    }
    hearing = {
        "d_model": 32,
        "encoder_layers": 2,
        "num_hidden_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "output_dim": TEXT["hidden_size"],
        "downsample_hidden_size": 16,
    }
    seeing = base["vision_config"] | {"deepstack_visual_indexes": [0, 1]}
    del seeing["model_type"]
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    speaking = text | small | {"shared_expert_intermediate_size": 32, "vocab_size": 64}
    write(path, "config.json", {
        "model_type": "qwen3_omni_moe",
        "eos_token_id": 2,
        "thinker_config": {
            "text_config": text,
            "vision_config": seeing,
            "audio_config": hearing,
            "image_token_id": base["image_token_id"],
            "video_token_id": base["video_token_id"],
            "vision_start_token_id": base["vision_start_token_id"],
            "vision_end_token_id": base["vision_end_token_id"],
            "audio_start_token_id": opening,
            "audio_end_token_id": closing,
            "audio_token_id": sound,
        },
        "talker_config": {
            "text_config": speaking,
            "code_predictor_config": small | {"num_code_groups": 2, "vocab_size": 64},
            "num_code_groups": 2,
            "thinker_hidden_size": TEXT["hidden_size"],
        },
        "code2wav_config": small | {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "decoder_dim": 32,
            "codebook_dim": 16,
            "codebook_size": 64,
            "num_quantizers": 2,
        },
    })  # fmt: skip


def _hear(path: Path, marker: str) -> None:
    """Make the template render sounds."""
    template = path / "chat_template.jinja"
    seen = "{%- elif part.type in ('video', 'video_url') -%}"
    written = template.read_text()
    assert seen in written
    audio_branch = "{%- elif part.type in ('audio', 'input_audio') -%}{{- '" + marker + "' -}}"
    template.write_text(written.replace(seen, audio_branch + seen))
