"""Parakeet and Qwen3-ASR: their windows are what mlx-audio makes of each, with shifted times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from backend.engine.media.items import SOUND_RATE
from backend.engine.speech import speech_families
from backend.engine.speech.speech_builder import open_model
from backend.engine.speech.speech_families import abilities_of, transcriber
from backend.engine.speech.transcript import Speech, Transcribed
from backend.engine.speech.windows import windows
from tests.engine.speech.tiny_speech import speech, write_parakeet, write_qwen


@pytest.fixture(scope="module")
def parakeet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_model(write_parakeet(tmp_path_factory.mktemp("parakeet")), "parakeet")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_model(write_qwen(tmp_path_factory.mktemp("qwen")), "qwen3_asr")


def heard(model_type: str, model: Any, given: Speech) -> list[Transcribed]:
    return [each for each in transcriber(model_type, model)(given) if each is not None]


def test_the_sentences_of_parakeet_have_words_with_times(parakeet: Any) -> None:
    samples = speech(40.0)
    found = heard("parakeet", parakeet, Speech(samples, words=True))
    assert [each.samples for each in found] == [end for _, end in windows(samples)]
    for each, (start, end) in zip(found, windows(samples), strict=True):
        theirs = parakeet.generate(mx.array(samples[start:end]), dtype=mx.float32)
        sentences = [sentence for sentence in theirs.sentences if sentence.text.strip()]
        assert sentences
        assert [segment.tokens for segment in each.segments] == [
            tuple(token.id for token in sentence.tokens) for sentence in sentences
        ]
        offset = start / SOUND_RATE
        for segment, sentence in zip(each.segments, sentences, strict=True):
            assert segment.start == pytest.approx(sentence.start + offset)
            assert "".join(word.text for word in segment.words) == sentence.text
            assert segment.words[-1].end == pytest.approx(sentence.end + offset)


def test_the_pieces_of_qwen_are_those_of_mlx_audio(qwen: Any) -> None:
    samples = speech(33.0)
    given = Speech(samples, language="de", prompt="abc")
    found = heard("qwen3_asr", qwen, given)
    for each, (start, end) in zip(found, windows(samples), strict=True):
        theirs = qwen.generate(
            mx.array(samples[start:end]), language="German", system_prompt="abc", max_tokens=1024
        )
        assert "".join(segment.text for segment in each.segments).strip() == theirs.text.strip()
        assert each.language == "de"
        assert all(segment.start == start / SOUND_RATE for segment in each.segments)


def test_each_family_says_what_it_reads(parakeet: Any, qwen: Any) -> None:
    assert not abilities_of("parakeet", parakeet).languages
    assert abilities_of("parakeet", parakeet).times_words
    languages = abilities_of("qwen3_asr", qwen).languages
    assert languages == {"en": "en", "english": "en", "de": "de", "german": "de"}
    assert not abilities_of("qwen3_asr", qwen).translates


def test_a_checkpoint_s_own_code_is_not_run(tmp_path: Path) -> None:
    """mlx-audio would trust it."""
    folder = write_qwen(tmp_path / "qwen")
    settings = folder / "tokenizer_config.json"
    settings.write_text(
        settings.read_text()[:-1] + ', "auto_map": {"AutoTokenizer": [null, "code.Evil"]}}'
    )
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    open_model(folder, "qwen3_asr")
    assert not (tmp_path / "ran").exists()


def test_audio_is_computed_in_the_type_of_the_weights() -> None:
    """Packed weights are integers, and say nothing about it."""
    packed = QuantizedLinear(64, 8)
    packed.set_dtype(mx.bfloat16)
    assert speech_families._dtype(packed) == mx.bfloat16
    assert speech_families._dtype(Linear(8, 8)) == mx.float32
