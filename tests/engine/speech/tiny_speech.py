"""Builds small speech-to-text checkpoints with random weights, in the form of the originals."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_audio.stt.models.whisper.tokenizer import LANGUAGES
from mlx_audio.stt.models.whisper.whisper import Model, ModelConfig
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SIZE = 16
_BASE = 50_257  # tokens of text
# mlx-audio's names → Hugging Face's; the first that occurs replaces.
_HF = (
    (".cross_attn_ln.", ".encoder_attn_layer_norm."),
    (".attn_ln.", ".self_attn_layer_norm."),
    (".mlp_ln.", ".final_layer_norm."),
    (".cross_attn.query.", ".encoder_attn.q_proj."),
    (".cross_attn.key.", ".encoder_attn.k_proj."),
    (".cross_attn.value.", ".encoder_attn.v_proj."),
    (".cross_attn.out.", ".encoder_attn.out_proj."),
    (".attn.query.", ".self_attn.q_proj."),
    (".attn.key.", ".self_attn.k_proj."),
    (".attn.value.", ".self_attn.v_proj."),
    (".attn.out.", ".self_attn.out_proj."),
    (".mlp1.", ".fc1."),
    (".mlp2.", ".fc2."),
    (".ln_post.", ".layer_norm."),
    ("decoder.ln.", "decoder.layer_norm."),
    ("decoder.token_embedding.", "decoder.embed_tokens."),
    ("decoder.positional_embedding", "decoder.embed_positions.weight"),
)


def write_whisper(folder: Path, *, multilingual: bool = True, times: bool = True) -> Path:
    """Write a Whisper of two layers in Hugging Face's form; returns the folder.

    times: whether the tokenizer has the tokens of times, which older ones lack.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = list(_special_tokens(multilingual=multilingual))
    base = _BASE if multilingual else 300
    config = {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "is_encoder_decoder": True,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": 64,
        "d_model": SIZE,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "vocab_size": base + len(tokens),
    }
    mx.random.seed(7)
    model = Model(ModelConfig.from_dict(config), mx.float32)
    weights = {}
    for name, value in _parameters(model):
        scale = 0.5 if "bias" not in name else 0.1
        drawn = value if name.endswith(("ln.weight", "ln_post.weight")) else None
        drawn = mx.random.normal(value.shape) * scale if drawn is None else drawn
        weights[_hf_name(name)] = (
            drawn.transpose(0, 2, 1) if ".conv" in name and drawn.ndim == 3 else drawn
        )
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    _write(folder / "config.json", config)
    _write(
        folder / "preprocessor_config.json",
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80},
    )
    known = tokens if times else tokens[: tokens.index("<|0.00|>")]
    _tokenizer(base, known).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "WhisperTokenizer", "model_max_length": 64}
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    _write(folder / "tokenizer_config.json", settings | ends)
    return folder


def speech(seconds: float, seed: int = 0) -> np.ndarray:
    """Tones that change and pause, at 16,000 samples per second."""
    draws = np.random.default_rng(seed)
    pieces: list[np.ndarray] = []
    while sum(map(len, pieces)) < seconds * 16_000:
        time = np.arange(int(draws.integers(2_000, 12_000))) / 16_000
        pitch, loud = draws.uniform(100, 900), draws.choice([0.0, 0.2, 0.5])
        pieces.append(loud * np.sin(2 * np.pi * pitch * time))
    return np.concatenate(pieces)[: int(seconds * 16_000)].astype(np.float32)


def _special_tokens(*, multilingual: bool) -> Iterator[str]:
    yield from ("<|endoftext|>", "<|startoftranscript|>")
    if multilingual:
        yield from (f"<|{code}|>" for code in list(LANGUAGES)[:99])
    yield from ("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>")
    yield from ("<|nospeech|>", "<|notimestamps|>")
    yield from (f"<|{at * 0.02:.2f}|>" for at in range(1501))


def _tokenizer(base: int, special: list[str]) -> Tokenizer:
    """Bytes, tokens that no text has, then the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*letters, *(f"Ġw{at}" for at in range(base - len(letters)))]
    tokenizer = Tokenizer(models.BPE({text: at for at, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def _hf_name(name: str) -> str:
    name = name.replace(".blocks.", ".layers.")
    for own, theirs in _HF:
        if own in name:
            name = name.replace(own, theirs)
            break
    return f"model.{name}"


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))


def write_parakeet(folder: Path) -> Path:
    """Write a Parakeet TDT, whose vocabulary is in its configuration; returns the folder."""
    from mlx_audio.stt.models import parakeet

    folder.mkdir(parents=True, exist_ok=True)
    words = ["▁a", "b", "▁c", ".", "d"]
    config: dict[str, Any] = {
        "target": "nemo.collections.asr.models.rnnt_bpe_models.EncDecRNNTBPEModel",
        "model_defaults": {"tdt_durations": [0, 1, 2, 3, 4]},
        "preprocessor": {
            "sample_rate": 16_000,
            "normalize": "per_feature",
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": 80,
            "n_fft": 512,
            "dither": 1e-05,
            "pad_to": 0,
            "pad_value": 0.0,
        },
        "encoder": {
            "feat_in": 80,
            "n_layers": 1,
            "d_model": SIZE,
            "n_heads": 2,
            "self_attention_model": "rel_pos",
            "subsampling": "dw_striding",
            "causal_downsampling": False,
            "pos_emb_max_len": 5000,
            "ff_expansion_factor": 2,
            "subsampling_factor": 8,
            "subsampling_conv_channels": SIZE,
            "dropout_rate": 0.0,
            "attention_dropout_rate": 0.0,
            "conv_dropout_rate": 0.0,
            "conv_kernel_size": 9,
            "causal_depthwise_conv": False,
        },
        "decoder": {
            "blank_as_pad": True,
            "vocab_size": len(words),
            "prednet": {"pred_hidden": SIZE, "pred_rnn_layers": 1},
        },
        "joint": {
            "num_classes": len(words),
            "num_extra_outputs": 5,
            "vocabulary": words,
            "jointnet": {
                "encoder_hidden": SIZE,
                "pred_hidden": SIZE,
                "joint_hidden": SIZE,
                "activation": "relu",
            },
        },
        "decoding": {
            "model_type": "tdt",
            "durations": [0, 1, 2, 3, 4],
            "greedy": {"max_symbols": 10},
        },
    }
    mx.random.seed(3)
    model = parakeet.Model(parakeet.ModelConfig.from_dict(config))
    _save(folder, model)
    _write(folder / "config.json", config)
    return folder


def write_qwen(folder: Path) -> Path:
    """Write a Qwen3-ASR with a tokenizer of bytes; returns the folder."""
    from mlx_audio.stt.models import qwen3_asr

    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = "<|im_start|> <|im_end|> <|endoftext|> <|audio_start|> <|audio_pad|> <|audio_end|>"
    special = [*marks.split(), "<asr_text>"]
    tokens = {text: len(letters) + at for at, text in enumerate(special)}
    config = {
        "model_type": "qwen3_asr",
        "audio_token_id": tokens["<|audio_pad|>"],
        "audio_start_token_id": tokens["<|audio_start|>"],
        "audio_end_token_id": tokens["<|audio_end|>"],
        "support_languages": ["English", "German"],
        "audio_config": {
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": SIZE,
            "d_model": SIZE,
            "output_dim": SIZE,
            "downsample_hidden_size": 8,
        },
        "text_config": {"vocab_size": len(letters) + len(special)} | _decoder_sizes(),
    }
    mx.random.seed(4)
    model = qwen3_asr.Model(qwen3_asr.ModelConfig.from_dict(config))
    _save(folder, model)
    _write(folder / "config.json", config)
    _write(
        folder / "preprocessor_config.json",
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128},
    )
    _tokenizer(len(letters), special).save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"},
    )
    return folder


def _parameters(model: Any) -> list[tuple[str, mx.array]]:
    found: Any = tree_flatten(model.parameters())
    return list(found)


def _save(
    folder: Path, model: Any, stored: Callable[[str, mx.array], mx.array] | None = None
) -> None:
    """Save a model with random weights instead of its own.

    stored: returns a weight as the original checkpoints have it.
    """
    drawn = {
        name: mx.random.normal(value.shape) * (0.3 if value.ndim > 1 else 0.1)
        for name, value in _parameters(model)
        if mx.issubdtype(value.dtype, mx.floating)
    }
    drawn |= {name: mx.abs(drawn[name]) for name in drawn if name.endswith("running_var")}
    if stored:
        drawn = {name: stored(name, value) for name, value in drawn.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), drawn)


def write_voxtral(folder: Path) -> Path:
    """Write a Voxtral with Mistral's tokenizer of bytes; returns the folder."""
    from mlx_audio.stt.models import voxtral

    config = {
        "model_type": "voxtral",
        "audio_token_id": 24,
        "audio_config": _encoder_sizes() | {"intermediate_size": 4 * SIZE},
        "text_config": _decoder_sizes() | {"vocab_size": _TEKKEN},
    }
    return _written(folder, voxtral, config, tekken=True)


def write_voxtral_realtime(folder: Path) -> Path:
    """Write a Voxtral Realtime of one layer; returns the folder."""
    from mlx_audio.stt.models import voxtral_realtime

    sizes = {"dim": SIZE, "n_layers": 1, "n_heads": 2, "head_dim": 8, "hidden_dim": SIZE}
    config = {
        "model_type": "voxtral_realtime",
        "encoder_args": sizes | {"n_kv_heads": 2},
        "decoder": sizes
        | {"dim": 3072, "n_kv_heads": 1, "vocab_size": _TEKKEN, "ada_rms_norm_t_cond_dim": 4},
    }
    return _written(folder, voxtral_realtime, config, tekken=True)


def write_glmasr(folder: Path) -> Path:
    """Write a GLM-ASR of one layer; returns the folder."""
    from mlx_audio.stt.models import glmasr

    vocabulary, ends = _byte_vocabulary(_GLM_TOKENS)
    config = {
        "model_type": "glmasr",
        "whisper_config": _encoder_sizes(),
        "lm_config": _decoder_sizes()
        | {"vocab_size": vocabulary, "rope_dim": 8, "eos_token_id": [ends], "pad_token_id": ends},
    }
    return _written(folder, glmasr, config, special=_GLM_TOKENS)


def write_granite(folder: Path) -> Path:
    """Write a Granite Speech of one layer; returns the folder."""
    from mlx_audio.stt.models import granite_speech

    vocabulary, ends = _byte_vocabulary(["<|end|>", "<|audio|>"])
    config = {
        "model_type": "granite_speech",
        "audio_token_index": ends + 1,
        "encoder_config": {
            "num_layers": 1,
            "hidden_dim": SIZE,
            "num_heads": 2,
            "dim_head": 8,
            "output_dim": 4,
        },
        "projector_config": {
            "hidden_size": SIZE,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": SIZE,
            "encoder_hidden_size": SIZE,
        },
        "text_config": _decoder_sizes() | {"vocab_size": vocabulary, "model_type": "granite"},
    }
    return _written(folder, granite_speech, config, special=["<|end|>", "<|audio|>"])


def write_moonshine(folder: Path) -> Path:
    """Write a Moonshine of one layer; returns the folder."""
    from mlx_audio.stt.models import moonshine

    vocabulary, ends = _byte_vocabulary(["<|end|>", "<|begin|>"])
    config = {
        "model_type": "moonshine",
        "vocab_size": vocabulary,
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "encoder_num_hidden_layers": 1,
        "decoder_num_hidden_layers": 1,
        "encoder_num_attention_heads": 2,
        "decoder_num_attention_heads": 2,
        "eos_token_id": ends,
        "bos_token_id": ends + 1,
        "decoder_start_token_id": ends + 1,
    }
    return _written(folder, moonshine, config, special=["<|end|>", "<|begin|>"])


_GLM_TOKENS = ["<|end|>", "<|user|>", "<|begin_of_audio|>", "<|end_of_audio|>", "<|assistant|>"]
_CONTROL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TRANSCRIBE]", "[BEGIN_AUDIO]"]
_PAIRS = [b"la", b"ng", b":d", b":de", b"lang"]
_TEKKEN = 40 + 256 + len(_PAIRS)


def _encoder_sizes() -> dict[str, Any]:
    return {
        "d_model": SIZE,
        "hidden_size": SIZE,
        "encoder_layers": 1,
        "num_hidden_layers": 1,
        "encoder_attention_heads": 2,
        "num_attention_heads": 2,
        "encoder_ffn_dim": SIZE,
    }


def _decoder_sizes() -> dict[str, Any]:
    return {
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 4096,
    }


def _byte_vocabulary(special: list[str]) -> tuple[int, int]:
    """Return the size of a vocabulary of bytes and special tokens, and the first of these."""
    letters = len(pre_tokenizers.ByteLevel.alphabet())
    return letters + len(special), letters


def _written(
    folder: Path,
    module: Any,
    config: dict[str, Any],
    *,
    special: list[str] | None = None,
    tekken: bool = False,
) -> Path:
    """Write a checkpoint with random weights.

    special: tokens of a tokenizer of bytes, of which the first ends a text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(11)
    model = module.Model(module.ModelConfig.from_dict(json.loads(json.dumps(config))))
    _save(folder, model, _STORED.get(config["model_type"]))
    _write(folder / "config.json", config)
    _write(
        folder / "preprocessor_config.json",
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128},
    )
    if tekken:
        _write(folder / "tekken.json", _tekken())
    if special:
        letters = len(pre_tokenizers.ByteLevel.alphabet())
        _tokenizer(letters, special).save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[0]}
        _write(folder / "tokenizer_config.json", settings)
    return folder


def _stored(name: str, value: mx.array) -> mx.array:
    """Convolutions as PyTorch has them."""
    return value.transpose(0, 2, 1) if "conv" in name and value.ndim == 3 else value


def _stored_memory(name: str, value: mx.array) -> mx.array:
    return value.transpose(0, 2, 1) if "fsmn_block.weight" in name else value


_STORED = {"moonshine": _stored, "sensevoice": _stored_memory}


def _tekken() -> dict[str, Any]:
    """Mistral's form: control tokens, bytes, what is joined of them, and one in reserve."""
    ranks = {name: at for at, name in enumerate(_CONTROL)} | {"[AUDIO]": 24, "<pad>": 11}
    words = [*(bytes([byte]) for byte in range(256)), *_PAIRS, b":d reserved"]
    return {
        "config": {"default_num_special_tokens": 40, "default_vocab_size": _TEKKEN},
        "special_tokens": [{"rank": rank, "token_str": name} for name, rank in ranks.items()],
        "vocab": [{"token_bytes": base64.b64encode(word).decode()} for word in words],
    }


def write_canary(folder: Path) -> Path:
    """Write a Canary of one layer, with a tokenizer of SentencePiece; returns the folder."""
    from mlx_audio.stt.models import canary

    marks = "startofcontext startoftranscript emo:undefined endoftext pnc noitn notimestamp"
    special = [f"<|{mark}|>" for mark in (*marks.split(), "nodiarize", "en", "de")]
    vocabulary = _sentence_pieces(folder / "tokenizer.model", special)
    config = {
        "model_type": "canary",
        "vocab_size": vocabulary,
        "enc_output_dim": SIZE,
        "encoder": {"n_layers": 1, "d_model": SIZE, "n_heads": 2, "subsampling_conv_channels": 8},
        "transf_decoder": {
            "num_layers": 1,
            "hidden_size": SIZE,
            "num_attention_heads": 2,
            "inner_size": SIZE,
        },
        "supported_languages": ["en", "de"],
    }
    return _written(folder, canary, config)


def write_sensevoice(folder: Path) -> Path:
    """Write a SenseVoice of one layer, with a tokenizer of SentencePiece; returns the folder."""
    from mlx_audio.stt.models import sensevoice

    vocabulary = _sentence_pieces(folder / "chn_jpn_yue_eng_ko_spectok.bpe.model", [])
    layers = {"output_size": SIZE, "linear_units": SIZE, "num_blocks": 1, "tp_blocks": 1}
    config = {
        "model_type": "sensevoice",
        "vocab_size": vocabulary,
        "encoder_conf": layers | {"attention_heads": 2},
    }
    return _written(folder, sensevoice, config)


def _sentence_pieces(file: Path, special: list[str]) -> int:
    """Write a model of SentencePiece; returns the number of its tokens."""
    import sentencepiece

    file.parent.mkdir(parents=True, exist_ok=True)
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one two three four five six seven eight nine ten"] * 4),
        model_writer=made,
        vocab_size=20 + len(special),
        user_defined_symbols=special,
        minloglevel=2,
    )
    file.write_bytes(made.getvalue())
    return 20 + len(special)
