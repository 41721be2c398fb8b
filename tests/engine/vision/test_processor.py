"""The interface between the engine and mlx-vlm's processors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.media.items import DecodedAudio
from backend.engine.vision.features import frozen, thawed
from backend.engine.vision.processor import ItemProcessor, end_tokens, load_processor
from tests.engine.vision.checkpoint_files import read, write
from tests.engine.vision.seeing import TINY_VISION, samples_of


def test_arrays_survive_the_conversion() -> None:
    """muse_spark's processor makes lists of MLX arrays, and DeepSeek-OCR's arrays of bfloat16."""
    held = {
        "one": mx.arange(6).reshape(2, 3),
        "several": [mx.array([1.5, 2.5], mx.bfloat16), (mx.array([1], mx.int32), "text", None)],
        "other": [np.arange(3)],
    }
    cold = {name: frozen(value) for name, value in held.items()}
    assert isinstance(cold["one"], np.ndarray)
    assert isinstance(cold["several"][0], np.ndarray)
    back = thawed(cold)
    assert back["one"].tolist() == [[0, 1, 2], [3, 4, 5]]
    first, (second, *rest) = back["several"]
    assert isinstance(first, mx.array)
    assert first.tolist() == [1.5, 2.5]
    assert isinstance(second, mx.array)
    assert second.dtype == mx.int32
    assert rest == ["text", None]
    assert type(back["other"][0]) is np.ndarray


def test_a_processor_gets_a_sound_at_its_own_rate(tmp_path: Path) -> None:
    processor = _muse_spark(tmp_path)
    samples = samples_of(1000)
    item = ItemProcessor(processor, None, (), 1 << 62, {"audio": "<|audio|>"}).prepare(
        DecodedAudio(samples, 16_000, b"1"), "the first"
    )
    assert item.arrays["audio_lengths"] == [len(samples) * 3 // 2]
    processed = item.arrays["input_values"][0, 100:-2000]
    expected = np.sin(np.arange(12_000) / 24_000 * 2 * np.pi * 1000) / 2
    assert np.abs(processed[:5000] - expected[100:5100]).max() < 0.01


def test_the_end_tokens_of_a_processor_end_answers(tmp_path: Path) -> None:
    assert end_tokens(_muse_spark(tmp_path)) == {200001, 200008}


def _muse_spark(path: Path) -> object:
    """The processor of a checkpoint with sound input, whose model runs on Metal only."""
    from mlx_vlm.models.muse_spark.processing_muse_spark import MuseSparkProcessor

    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_bytes((TINY_VISION / name).read_bytes())
    text = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "vocab_size": 516,
        "rms_norm_eps": 1e-6,
        "post_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0},
        "layer_rope_theta": [10000.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
        "final_logit_softcapping": 30.0,
        "output_multiplier": 1.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_hidden_size": 64,
        "moe_intermediate_size": 32,
    }
    config = {
        "model_type": "muse_spark",
        "text_config": text,
        "audio_config": {"out_hidden_size": 64},
    }
    (path / "config.json").write_text(json.dumps(config))
    return MuseSparkProcessor.from_pretrained(path)


def test_a_processor_that_trusts_any_code_runs_none_without_trust(tmp_path: Path) -> None:
    ran, path = tmp_path / "ran", tmp_path / "it"
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_VISION / name, path)
    write(path, "config.json", {"model_type": "inkling"})
    (path / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast): pass\n"
    )
    settings = read(path, "tokenizer_config.json")
    settings["auto_map"] = {"AutoTokenizer": [None, "own.Own"]}
    write(path, "tokenizer_config.json", settings)
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_processor(path, trust_remote_code=False)
    assert not ran.exists()
