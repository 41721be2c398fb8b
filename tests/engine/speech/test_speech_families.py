"""Every family but Whisper: its windows are what mlx-audio makes of each, with shifted times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_audio.stt.models
import numpy as np
import pytest
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_audio.stt import load

from backend.engine.errors import ModelRejected
from backend.engine.loading.checkpoint import inspect_config
from backend.engine.media.items import AUDIO_RATE
from backend.engine.settings import Settings
from backend.engine.speech import speech_families
from backend.engine.speech.speech_builder import open_model
from backend.engine.speech.speech_families import abilities_of, transcriber
from backend.engine.speech.transcript import Speech, Transcribed
from backend.engine.speech.windows import windows
from common.model_kind import SPEECH_FAMILIES, SPEECH_TYPES
from tests.engine.speech import tiny_speech
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
        offset = start / AUDIO_RATE
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
        assert all(segment.start == start / AUDIO_RATE for segment in each.segments)


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


WRITTEN = {
    "canary": tiny_speech.write_canary,
    "glmasr": tiny_speech.write_glmasr,
    "granite_speech": tiny_speech.write_granite,
    "moonshine": tiny_speech.write_moonshine,
    "sensevoice": tiny_speech.write_sensevoice,
    "voxtral_realtime": tiny_speech.write_voxtral_realtime,
}


LIMITS = {"canary": {"max_tokens": 1000, "dtype": mx.float32}}


@pytest.mark.parametrize("model_type", WRITTEN)
def test_the_text_of_a_window_is_that_of_mlx_audio(model_type: str, tmp_path: Path) -> None:
    folder = WRITTEN[model_type](tmp_path / "model")
    model, theirs = open_model(folder, model_type), load(folder)
    samples = speech(31.0, seed=2)
    found = heard(model_type, model, Speech(samples))
    assert [each.samples for each in found] == [end for _, end in windows(samples)]
    texts = []
    for each, (start, end) in zip(found, windows(samples), strict=True):
        audio = mx.array(samples[start:end])
        text = theirs.generate(audio, **LIMITS.get(model_type, {"max_tokens": 1024})).text
        assert "".join(segment.text for segment in each.segments).strip() == text.strip()
        assert all(segment.start == start / AUDIO_RATE for segment in each.segments)
        assert all(segment.end == end / AUDIO_RATE for segment in each.segments)
        texts.append(text.strip())
    assert any(texts)


@pytest.mark.parametrize("model_type", [*WRITTEN, "voxtral"])
def test_the_shortest_recording_is_transcribed(model_type: str, tmp_path: Path) -> None:
    write = {**WRITTEN, "voxtral": tiny_speech.write_voxtral}[model_type]
    model = open_model(write(tmp_path / "model"), model_type)
    given = Speech(speech(0.001), temperature=0.5)
    first, again = (heard(model_type, model, given) for _ in range(2))
    assert first == again  # what is drawn depends on the recording only
    assert first[0].samples == len(given.samples)


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        (Speech(np.zeros(0)), "can you transcribe the speech into a written format?"),
        (
            Speech(np.zeros(0), "de", "Anna, Bo"),
            (
                "The speech is in German. Transcribe it exactly; do not translate. "
                "transcribe the speech to text. Keywords: Anna, Bo"
            ),
        ),
        (Speech(np.zeros(0), "de", translate=True), "Translate the speech to English."),
    ],
)
def test_granite_is_asked_for_what_the_request_says(
    given: Speech, prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(tiny_speech.write_granite(tmp_path / "granite"), "granite_speech")
    build: Callable[..., mx.array] = model._build_prompt
    asked: list[str] = []

    def note(tokens: int, question: str, **options: Any) -> mx.array:
        asked.append(question)
        return build(tokens, question, **options)

    monkeypatch.setattr(model, "_build_prompt", note)
    samples = speech(1.0)
    heard(
        "granite_speech",
        model,
        Speech(samples, given.language, given.prompt, translate=given.translate),
    )
    assert asked == [prompt]


@pytest.mark.parametrize(
    ("language", "translate", "languages"),
    [("", False, ("en", "en")), ("de", False, ("de", "de")), ("de", True, ("de", "en"))],
)
def test_canary_is_told_the_language(
    language: str, translate: bool, languages: tuple[str, str], tmp_path: Path
) -> None:
    """It detects none."""
    model = open_model(tiny_speech.write_canary(tmp_path / "canary"), "canary")
    build: Callable[..., list[int]] = model._tokenizer.build_prompt_tokens
    asked = []

    def note(source_lang: str, target_lang: str, **options: Any) -> list[int]:
        asked.append((source_lang, target_lang))
        return build(source_lang, target_lang, **options)

    model._tokenizer.build_prompt_tokens = note
    (found,) = heard("canary", model, Speech(speech(1.0), language, translate=translate))
    assert asked == [languages]
    assert found.language == languages[0]


def _families() -> list[str]:
    (folder,) = mlx_audio.stt.models.__path__
    return sorted(path.parent.name for path in Path(folder).glob("*/__init__.py"))


@pytest.mark.parametrize("model_type", _families())
def test_a_family_of_mlx_audio_is_served_or_says_which_are(model_type: str, tmp_path: Path) -> None:
    config = {"model_type": model_type, "is_encoder_decoder": True, "audio_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if model_type in SPEECH_TYPES:
        assert inspect_config(tmp_path, Settings()) == config
        return
    with pytest.raises(ModelRejected) as refused:
        inspect_config(tmp_path, Settings())
    assert f"not served ({model_type!r}): load one of {SPEECH_FAMILIES}" in str(refused.value)
