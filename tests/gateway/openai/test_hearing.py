"""Sounds over HTTP: a sound in a message reaches the model."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.gateway_process import ROOT, GatewayProcess
from tests.models.tiny_omni_tasks import SOUNDS, play, telling, wav


@pytest.fixture(scope="module")
def hearing() -> Iterator[GatewayProcess]:
    model = {"parameters": {"model": str(ROOT / "tests" / "models" / "tiny_omni")}}
    process = GatewayProcess({"ear": model | {"context_size": 1024}})
    yield process
    process.close()


def sound(kind: str, form: str = "wav") -> dict[str, Any]:
    data = base64.b64encode(wav(play(random.Random(kind), kind, 0.7))).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def body(*parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "ear",
        "temperature": 0,
        "max_tokens": 40,
        "messages": [{"role": "user", "content": list(parts)}],
        "chat_template_kwargs": {"enable_thinking": False},
    }


def chat(gateway: GatewayProcess, *parts: dict[str, Any]) -> Any:
    return gateway.client.post("/v1/chat/completions", json=body(*parts))


@pytest.mark.parametrize("kind", SOUNDS)
def test_the_sound_is_named(hearing: GatewayProcess, kind: str) -> None:
    answer = chat(hearing, sound(kind), text("What is the sound like?"))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == telling([kind])


@pytest.mark.parametrize("prefix", ["", "data:audio/wav;base64,"])
def test_a_file_of_responses_may_be_a_sound(hearing: GatewayProcess, prefix: str) -> None:
    """Kimi CLI sends sounds so. A file that only claims to be a sound is refused."""
    data = sound("high")["input_audio"]["data"]
    asked = {"type": "input_text", "text": "What is the sound like?"}

    def answer(data: str) -> Any:
        file = {"type": "input_file", "file_data": prefix + data, "filename": "inline.wav"}
        content = [{"role": "user", "content": [file, asked]}]
        fields = {"model": "ear", "temperature": 0, "max_output_tokens": 40, "input": content}
        return hearing.client.post("/v1/responses", json=fields | {"reasoning": {"effort": "none"}})

    heard = answer(data)
    assert heard.status_code == 200, heard.text
    assert heard.json()["output"][-1]["content"][0]["text"] == telling(["high"])
    refused = answer(base64.b64encode(b"\xfa\0no sound").decode())
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input[0].content[0].type"


@pytest.mark.parametrize("kinds", [("low", "high"), ("high", "low")])
def test_two_sounds_are_named_in_order(hearing: GatewayProcess, kinds: tuple[str, str]) -> None:
    answer = chat(hearing, *map(sound, kinds), text("What are the sounds like?"))
    assert answer.json()["choices"][0]["message"]["content"] == telling(list(kinds))


def test_an_invalid_sound_is_refused_with_its_path(hearing: GatewayProcess) -> None:
    broken = {"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}}
    answer = chat(hearing, text("What is the sound like?"), broken)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[1].input_audio"


def test_a_truncated_sound_is_refused_with_its_path(hearing: GatewayProcess) -> None:
    cut = sound("low")
    cut["input_audio"]["data"] = cut["input_audio"]["data"][:40]
    answer = chat(hearing, sound("low"), cut, text("What are the sounds like?"))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "messages[0].content[1].input_audio"


def test_a_sound_that_the_processor_refuses_is_refused_with_its_path(
    hearing: GatewayProcess,
) -> None:
    short = sound("low")
    one_sample = wav(play(random.Random("low"), "low", 0.7)[:1])
    short["input_audio"]["data"] = base64.b64encode(one_sample).decode()
    answer = chat(hearing, text("What is the sound like?"), short)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "messages[0].content[1].input_audio"
    assert "Audios" not in answer.json()["error"]["message"]


def test_a_sound_in_another_format_than_stated_is_refused(hearing: GatewayProcess) -> None:
    answer = chat(hearing, sound("low", "mp3"), text("What is the sound like?"))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].input_audio"
