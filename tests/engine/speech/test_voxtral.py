"""Voxtral is asked in Mistral's words, and its text is that of the model."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from backend.engine.errors import Unusable
from backend.engine.speech.speech_builder import open_model
from backend.engine.speech.speech_families import transcriber
from backend.engine.speech.transcript import Speech
from backend.engine.speech.voxtral import Processor
from tests.engine.speech import tiny_speech
from tests.engine.speech.tiny_speech import speech


@pytest.fixture(scope="module")
def voxtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_speech.write_voxtral(tmp_path_factory.mktemp("voxtral") / "voxtral")


@pytest.mark.parametrize(
    ("language", "words"),
    [("", []), ("de", [b"lang", b":de"]), ("fr", [b"lang", b":", b"f", b"r"])],
)
def test_voxtral_is_asked_in_mistral_s_words(
    voxtral: Path, language: str, words: list[bytes]
) -> None:
    """<s> [INST] [BEGIN_AUDIO], [AUDIO] for each position, [/INST], the language, [TRANSCRIBE]."""
    processor = Processor(voxtral, 375)
    inputs = processor.apply_transcription_request(language, mx.zeros(16_000), "")
    (ids,) = inputs["input_ids"]
    assert ids[:3] == [1, 3, 6]
    assert ids[3 : 3 + 375] == [24] * 375
    known = [processor._ids[word] for word in words]
    assert ids[378:] == [4, *known, 5]
    assert inputs["input_features"].shape == (1, 128, 3000)


def test_the_text_of_voxtral_is_that_of_its_model(voxtral: Path) -> None:
    """mlx-audio's own processor needs mistral-common, so the model is fed by hand."""
    model = open_model(voxtral, "voxtral")
    samples = speech(4.0)
    (found,) = [*transcriber("voxtral", model)(Speech(samples, "de"))]
    inputs = model._processor.apply_transcription_request("de", mx.array(samples), "")
    features = mx.array(inputs["input_features"]).transpose(0, 2, 1)
    tokens = mx.array(inputs["input_ids"])
    said: list[int] = []
    while len(said) < 1024:
        given = mx.concatenate([tokens, mx.array([said], mx.int32)], axis=1)
        token = int(model(given, features)[0, -1].argmax())
        if token in (2, 4, 11):
            break
        said.append(token)
    assert said
    assert found is not None
    assert "".join(each.text for each in found.segments) == model._processor.decode(said)


def test_mistral_s_own_form_of_the_weights_is_not_read(voxtral: Path, tmp_path: Path) -> None:
    """Its repositories have the weights twice."""
    folder = tiny_speech.write_voxtral(tmp_path / "voxtral")
    mx.save_safetensors(str(folder / "consolidated.safetensors"), {"norm.weight": mx.ones(3)})
    samples = Speech(speech(1.0))
    once, twice = (
        [*transcriber("voxtral", open_model(path, "voxtral"))(samples)]
        for path in (voxtral, folder)
    )
    assert once == twice


def test_a_voxtral_without_its_tokens_is_refused(voxtral: Path, tmp_path: Path) -> None:
    folder = tiny_speech.write_voxtral(tmp_path / "voxtral")
    data = json.loads((folder / "tekken.json").read_text())
    data["special_tokens"] = [
        each for each in data["special_tokens"] if each["token_str"] != "[TRANSCRIBE]"
    ]
    (folder / "tekken.json").write_text(json.dumps(data))
    with pytest.raises(Unusable, match=r"no token \[TRANSCRIBE\]"):
        open_model(folder, "voxtral")
