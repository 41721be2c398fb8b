"""OpenAI's SDKs for Python and JavaScript, and programs built on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import soundfile

from tests.clients.environments import client_tool, node_program, python_program
from tests.engine.speech.tiny_speech import speech, write_whisper
from tests.gateway.gateway_process import GatewayProcess

COUNTED = "1 2 3 4 5"
PARIS = ["get_weather", {"city": "Paris"}]


@pytest.fixture(scope="module")
def results(gateway: GatewayProcess) -> Any:
    return python_program("openai_sdk", gateway.url)


def test_models(results: Any) -> None:
    assert {"tiny", "gpt-4o-mini"} <= set(results["models"])
    assert results["model"] == "tiny"


def test_chat_and_stream_agree(results: Any) -> None:
    assert results["chat"] == results["streamed"] == COUNTED
    assert results["usage"] == results["stream_usage"]
    assert results["usage"][1] > 0
    assert results["roles"] == ["assistant"]
    assert [results["finish"], results["short"]] == ["stop", "length"]


def test_reasoning_is_separate(results: Any) -> None:
    reasoning, content = results["thinking"]
    assert "3 + 4 = 7" in reasoning
    assert content == "3 + 4 = 7"


def test_tools(results: Any) -> None:
    assert results["call"] == results["streamed_call"] == PARIS
    assert results["call_finish"] == "tool_calls"
    assert "Paris" in results["after_tool"]


def test_parse_choices_and_logprobs(results: Any) -> None:
    assert results["parsed"] is True
    assert results["n"] == [0, 1, 2]
    assert results["logprobs"] == [COUNTED, True]
    assert results["echo"] == ["1 2 3", None]


def test_errors_are_the_sdks_own(results: Any) -> None:
    assert results["timeout"] == "APITimeoutError"
    assert results["unknown_model"][:3] == ["NotFoundError", 404, "model"]
    assert results["bad_temperature"][:3] == ["BadRequestError", 400, "temperature"]
    assert results["unserved_form"][:3] == ["BadRequestError", 400, "structural_tag"]


def test_responses(results: Any) -> None:
    assert results["response"] == results["response_final"] == COUNTED
    assert results["response_events"][0] == "response.created"
    assert results["response_events"][-1] == "response.completed"


def test_litellm(gateway: GatewayProcess) -> None:
    results = python_program("litellm_client", gateway.url, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert results == {"chat": COUNTED, "stream": COUNTED, "call": PARIS}


def test_langchain(gateway: GatewayProcess) -> None:
    results = python_program("langchain_client", gateway.url)
    assert results["invoke"] == results["stream"] == COUNTED
    assert results["batch"] == ["1 2 3", "1 2 3 4"]
    assert results["call"] == PARIS
    assert results["structured"] is True


def test_the_llm_command(gateway: GatewayProcess, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: tiny\n  model_name: tiny\n  api_base: {gateway.url}/v1\n"
    )
    asked = ("-m", "tiny", "-o", "temperature", "0", "Count to 5.")
    output = client_tool("llm", *asked, LLM_USER_PATH=str(tmp_path), OPENAI_API_KEY="unused")
    assert COUNTED in output


def test_javascript(gateway: GatewayProcess) -> None:
    results = node_program("openai_sdk", gateway.url)
    assert results["text"] == results["streamed"] == COUNTED
    assert results["refused"] == [404, "model_not_found", "model"]


def test_vercel_ai(gateway: GatewayProcess) -> None:
    results = node_program("vercel_ai", gateway.url)
    assert results["text"] == COUNTED
    assert results["streamed"] == " ".join(str(number) for number in range(1, 41))
    assert results["finish"] == "stop"
    assert results["call"] == results["streamedCall"] == [PARIS]
    assert "Paris" in results["afterTool"]
    assert results["object"] == ["capital", "country"]
    assert results["reasoning"][1] == "3 + 4 = 7"


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the SDK makes of the transcripts of a small Whisper."""
    folder = tmp_path_factory.mktemp("audio")
    file = folder / "speech.mp3"
    soundfile.write(file, speech(3.0), 16_000, format="MP3")
    model = {"parameters": {"model": str(write_whisper(folder / "whisper"))}}
    process = GatewayProcess({"whisper": model})
    yield python_program("openai_audio", process.url, str(file))
    process.close()


def test_transcripts_in_every_form(audio: Any) -> None:
    text = audio["json"]
    assert text
    detailed, language, seconds = audio["verbose"]  # words change where windows begin
    assert (language, round(seconds)) == ("en", 3)
    assert "".join(each[2] for each in audio["segments"]).strip() == detailed
    assert audio["words"]
    assert audio["text"].strip() == text
    assert audio["srt"].startswith("1\n")
    assert audio["vtt"].startswith("WEBVTT\n")
    assert audio["translated"]


def test_a_streamed_transcript(audio: Any) -> None:
    *deltas, done = audio["types"]
    assert set(deltas) == {"transcript.text.delta"}
    assert done == "transcript.text.done"
    assert audio["streamed"] == audio["done"] == audio["json"]


def test_refused_transcripts(audio: Any) -> None:
    assert audio["bad_language"] == ["BadRequestError", 400, "language"]
    assert audio["bad_form"] == ["BadRequestError", 400, "response_format"]
    assert audio["speakers"] == ["BadRequestError", 400, "known_speaker_names"]
