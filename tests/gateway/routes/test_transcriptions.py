"""`/audio/transcriptions` over HTTP: each form, streams, and refusals that name the field."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import soundfile

from tests.engine.speech.tiny_speech import speech, write_whisper
from tests.gateway.gateway_process import GatewayProcess, tiny

PATH = "/v1/audio/transcriptions"
EN = {"model": "whisper", "language": "en", "temperature": "0.4"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = write_whisper(tmp_path_factory.mktemp("whisper"))
    settings = {"parameters": {"model": str(folder)}}
    process = GatewayProcess({"whisper": settings, "tiny": tiny()})
    yield process
    process.close()


def recording(seconds: float = 3.0, form: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, speech(seconds), 16_000, format=form)
    return file.getvalue()


def ask(gateway: GatewayProcess, path: str = PATH, **fields: Any) -> httpx.Response:
    content = fields.pop("file", recording())
    files = {"file": ("a.wav", content)} if content is not None else {"other": ("a", b"")}
    data = {name: value for name, value in (EN | fields).items() if value is not None}
    return gateway.client.post(path, data=data, files=files)


def test_json_and_text_have_the_same_text(gateway: GatewayProcess) -> None:
    answer = ask(gateway)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"] == {"type": "duration", "seconds": 3}
    plain = ask(gateway, response_format="text")
    assert plain.text == answer.json()["text"] + "\n"
    assert plain.headers["content-type"].startswith("text/plain")


def test_verbose_json_has_segments_and_words(gateway: GatewayProcess) -> None:
    granularities: dict[str, Any] = {"timestamp_granularities[]": ["word", "segment"]}
    answer = ask(gateway, response_format="verbose_json", **granularities).json()
    assert (answer["task"], answer["language"], answer["duration"]) == ("transcribe", "en", 3.0)
    assert "".join(segment["text"] for segment in answer["segments"]).strip() == answer["text"]
    assert all(0 <= word["start"] <= word["end"] <= 33 for word in answer["words"])
    assert answer["words"]
    assert "words" not in ask(gateway, response_format="verbose_json").json()


def test_subtitles_have_a_cue_for_each_segment(gateway: GatewayProcess) -> None:
    segments = ask(gateway, response_format="verbose_json").json()["segments"]
    subtitles = ask(gateway, response_format="srt").text
    assert subtitles.startswith("1\n00:00:")
    assert subtitles.count(" --> ") == len(segments)
    web = ask(gateway, response_format="vtt").text
    assert web.startswith("WEBVTT\n\n00:00:")
    assert "," not in web.partition(" --> ")[0]


def test_a_stream_ends_with_the_whole_text(gateway: GatewayProcess) -> None:
    answer = ask(gateway, stream="true", file=recording(35.0, "MP3"))
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, last = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert last == "[DONE]"
    *deltas, done = [json.loads(line) for line in lines]
    assert {each["type"] for each in deltas} == {"transcript.text.delta"}
    assert len(deltas) > 1
    assert done["type"] == "transcript.text.done"
    assert "".join(each["delta"] for each in deltas) == done["text"]
    assert "segments" not in done
    more = ask(gateway, stream="true", response_format="verbose_json").text
    assert '"segments"' in more


def test_a_translation_is_english(gateway: GatewayProcess) -> None:
    path = "/v1/audio/translations"
    answer = ask(gateway, path, response_format="verbose_json", language=None).json()
    assert answer["task"] == "translate"
    ignored = ask(gateway, path)
    assert ignored.headers["x-ignored-fields"] == "language"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"file": None}, "file", "file is missing"),
        ({"file": b""}, "file", "file is empty"),
        ({"file": b"no sound at all"}, "file", "file is not in a known audio format"),
        ({"language": "xx"}, "language", "language is 'xx'"),
        ({"temperature": "hot"}, "temperature", "temperature should be a number"),
        ({"temperature": "7"}, "temperature", "temperature should be less than or equal to 1"),
        ({"response_format": "doc"}, "response_format", "response_format should be"),
        ({"stream": "true", "response_format": "srt"}, "response_format", "stream is true"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "send response_format"),
        ({"include[]": "logprobs"}, "include", "log-probabilities"),
        ({"model": "nothing"}, "model", "nothing"),
        ({"model": "tiny"}, "model", "generates text and accepts no audio"),
    ],
)
def test_a_refusal_names_the_field(
    gateway: GatewayProcess, fields: dict[str, Any], param: str | None, said: str
) -> None:
    answer = ask(gateway, **fields)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert said in error["message"]
    assert error["param"] == param


def test_a_file_is_never_a_path(gateway: GatewayProcess) -> None:
    """Nine bytes whose base64 is `///etc/hosts`, and others whose base64 is no such file's path."""
    answers = [ask(gateway, file=base64.b64decode(path)) for path in ("///etc/hosts", "/no/such")]
    said = [answer.json()["error"]["message"].partition(":")[0] for answer in answers]
    assert said == ["file is not in a known audio format"] * 2


@pytest.mark.parametrize("name", ["file", "model"])
def test_a_field_is_sent_once(gateway: GatewayProcess, name: str) -> None:
    fields: list[Any] = [("file", ("a.wav", recording())), ("model", (None, "whisper"))]
    fields += [field for field in fields if field[0] == name]
    answer = gateway.client.post(PATH, files=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{name} is in the form twice: send it once"
    assert answer.json()["error"]["param"] == name


def test_json_is_refused(gateway: GatewayProcess) -> None:
    answer = gateway.client.post(PATH, json={"model": "whisper"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_content_type"
