"""OpenAI's SDKs for Python and JavaScript, and programs built on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import client_tool, node_program, python_program
from tests.gateway.gateway_process import GatewayProcess

COUNTED = "1 2 3 4 5"
PARIS = ["get_weather", {"city": "Paris"}]


@pytest.fixture(scope="module")
def told(gateway: GatewayProcess) -> Any:
    return python_program("openai_sdk", gateway.url)


def test_models(told: Any) -> None:
    assert {"tiny", "gpt-4o-mini"} <= set(told["models"])
    assert told["model"] == "tiny"


def test_chat_and_stream_agree(told: Any) -> None:
    assert told["chat"] == told["streamed"] == COUNTED
    assert told["usage"] == told["stream_usage"]
    assert told["usage"][1] > 0
    assert told["roles"] == ["assistant"]
    assert [told["finish"], told["short"]] == ["stop", "length"]


def test_reasoning_is_separate(told: Any) -> None:
    reasoning, content = told["thinking"]
    assert "3 + 4 = 7" in reasoning
    assert content == "3 + 4 = 7"


def test_tools(told: Any) -> None:
    assert told["call"] == told["streamed_call"] == PARIS
    assert told["call_finish"] == "tool_calls"
    assert "Paris" in told["after_tool"]


def test_parse_choices_and_logprobs(told: Any) -> None:
    assert told["parsed"] is True
    assert told["n"] == [0, 1, 2]
    assert told["logprobs"] == [COUNTED, True]
    assert told["echo"] == ["1 2 3", None]


def test_errors_are_the_sdks_own(told: Any) -> None:
    assert told["timeout"] == "APITimeoutError"
    assert told["unknown_model"][:3] == ["NotFoundError", 404, "model"]
    assert told["bad_temperature"][:3] == ["BadRequestError", 400, "temperature"]
    assert told["unserved_form"][:3] == ["BadRequestError", 400, "ebnf"]


def test_responses(told: Any) -> None:
    assert told["response"] == told["response_final"] == COUNTED
    assert told["response_events"][0] == "response.created"
    assert told["response_events"][-1] == "response.completed"


def test_litellm(gateway: GatewayProcess) -> None:
    told = python_program("litellm_client", gateway.url, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert told == {"chat": COUNTED, "stream": COUNTED, "call": PARIS}


def test_langchain(gateway: GatewayProcess) -> None:
    told = python_program("langchain_client", gateway.url)
    assert told["invoke"] == told["stream"] == COUNTED
    assert told["batch"] == ["1 2 3", "1 2 3 4"]
    assert told["call"] == PARIS
    assert told["structured"] is True


def test_the_llm_command(gateway: GatewayProcess, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: tiny\n  model_name: tiny\n  api_base: {gateway.url}/v1\n"
    )
    asked = ("-m", "tiny", "-o", "temperature", "0", "Count to 5.")
    said = client_tool("llm", *asked, LLM_USER_PATH=str(tmp_path), OPENAI_API_KEY="unused")
    assert COUNTED in said


def test_javascript(gateway: GatewayProcess) -> None:
    told = node_program("openai_sdk", gateway.url)
    assert told["text"] == told["streamed"] == COUNTED
    assert told["refused"] == [404, "model_not_found", "model"]


def test_vercel_ai(gateway: GatewayProcess) -> None:
    told = node_program("vercel_ai", gateway.url)
    assert told["text"] == COUNTED
    assert told["streamed"] == " ".join(str(number) for number in range(1, 41))
    assert told["finish"] == "stop"
    assert told["call"] == told["streamedCall"] == [PARIS]
    assert "Paris" in told["afterTool"]
    assert told["object"] == ["capital", "country"]
    assert told["reasoning"][1] == "3 + 4 = 7"
