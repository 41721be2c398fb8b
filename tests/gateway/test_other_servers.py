"""What programs ask of a server of LM Studio or llama.cpp, and what Cursor sends to chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.asking import ADDITION, chunks, user_message
from tests.gateway.gateway_process import TINY_TEXT, GatewayProcess, tiny
from tests.gateway.test_responses import WEATHER as FLAT_WEATHER

Json = dict[str, Any]


@pytest.fixture(scope="module")
def unlimited() -> Iterator[GatewayProcess]:
    """A gateway whose model file sets no context size."""
    process = GatewayProcess({"tiny": tiny(context_size=0)})
    yield process
    process.close()


def get(gateway: GatewayProcess, path: str) -> Json:
    answer = gateway.client.get(path)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def test_the_context_of_a_checkpoint_is_known_without_one_in_the_file(
    unlimited: GatewayProcess,
) -> None:
    own = json.loads((TINY_TEXT / "config.json").read_text())["max_position_embeddings"]
    (card,) = get(unlimited, "/v1/models")["data"]
    assert {card["meta"]["context_size"], card["context_length"], card["max_model_len"]} == {own}
    assert get(unlimited, "/props")["default_generation_settings"]["n_ctx"] == own
    assert get(unlimited, "/api/v0/models")["data"][0]["max_context_length"] == own
    shown = unlimited.client.post("/api/show", json={"model": "tiny"}).json()
    assert shown["model_info"]["mlx.context_length"] == own
    assert shown["parameters"] == f"num_ctx {own}"


def test_a_smaller_context_in_the_file_counts(gateway: GatewayProcess) -> None:
    card = get(gateway, "/v1/models/tiny")
    assert card["context_length"] == card["max_model_len"] == 1024


def test_lm_studio_lists_what_a_model_can_do(gateway: GatewayProcess) -> None:
    """Zed's and Copilot's fields, of which Zed requires most."""
    (card,) = get(gateway, "/api/v0/models")["data"]
    assert get(gateway, "/api/v0/models/tiny") | {"state": ""} == card | {"state": ""}
    assert get(gateway, "/api/v0/models/gpt-4o-mini")["id"] == "tiny"
    assert card["state"] in ("loaded", "not-loaded", "loading")
    assert (card["id"], card["object"], card["type"]) == ("tiny", "model", "llm")
    assert (card["compatibility_type"], card["capabilities"]) == ("mlx", ["tool_use"])
    assert isinstance(card["publisher"], str)


def test_lm_studio_answers_chats(gateway: GatewayProcess) -> None:
    """Zed and Cline chat below the same prefix; errors keep OpenAI's form there."""
    body = {"model": "tiny", "messages": user_message(ADDITION), "temperature": 0}
    parts = chunks(gateway, "/api/v0/chat/completions", body)
    assert "12" in "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert get(gateway, "/api/v0/models/tiny")["loaded_context_length"] == 1024
    refused = gateway.client.post("/api/v0/chat/completions", json=body | {"model": "nobody"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_llama_cpp_tells_of_its_model(gateway: GatewayProcess) -> None:
    props = get(gateway, "/props?model=tiny")
    assert props["default_generation_settings"]["n_ctx"] == 1024
    assert (props["model_alias"], props["chat_template"]) == ("tiny", "")
    assert props["modalities"] == {"vision": False, "audio": False}
    assert gateway.client.get("/v1/props?model=nobody").status_code == 404


def test_a_body_of_responses_is_answered_as_a_chat(gateway: GatewayProcess) -> None:
    """Cursor sends such bodies to the path of chats, with flat tools."""
    flat = {**FLAT_WEATHER, "strict": False}
    asked: Json = {
        "model": "tiny",
        "input": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Weather in Paris?"}]},
        ],
        "tools": [flat, {"type": "custom", "name": "patch", "format": {"type": "text"}}],
        "tool_choice": {"type": "function", "name": "get_weather"},
        "temperature": 0,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_retention": "24h",
        "metadata": {"cursorRequestId": "1"},
    }
    whole = gateway.client.post("/v1/chat/completions", json=asked)
    assert whole.status_code == 200, whole.text
    assert whole.json()["object"] == "chat.completion"
    (call,) = whole.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    parts = chunks(gateway, "/v1/chat/completions", asked)
    calls = [part["choices"][0]["delta"].get("tool_calls", []) for part in parts]
    assert next(each["function"].get("name") for several in calls for each in several) == (
        "get_weather"
    )
    result = {"type": "function_call_output", "call_id": "c1", "output": "18 degrees, sunny"}
    made = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"}
    after = asked | {"input": [*asked["input"], made, result], "tool_choice": "none"}
    answered = gateway.client.post("/v1/chat/completions", json=after)
    assert answered.status_code == 200, answered.text
    assert answered.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "Hi", "temperature": "warm"}, "temperature"),
    ],
)
def test_what_a_chat_cannot_look_up_is_refused(
    gateway: GatewayProcess, fields: Json, param: str
) -> None:
    answer = gateway.client.post("/v1/chat/completions", json={"model": "tiny", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_pull_of_a_known_model_succeeds(gateway: GatewayProcess) -> None:
    """As Home Assistant asks before it uses a model."""
    pulled = gateway.client.post("/api/pull", json={"model": "tiny:latest", "stream": False})
    assert (pulled.status_code, pulled.json()) == (200, {"status": "success"})
    unknown = gateway.client.post("/api/pull", json={"model": "nobody"})
    assert unknown.status_code == 404
    assert "nobody" in unknown.json()["error"]


def test_editors_learn_a_models_name_and_infilling(
    gateway: GatewayProcess,
) -> None:
    """Copilot shows the base name; Continue completes code if the template has a suffix."""
    shown = gateway.client.post("/api/show", json={"model": "tiny"}).json()
    assert shown["model_info"]["general.basename"] == "tiny"
    assert ("insert" in shown["capabilities"]) == (".Suffix" in shown["template"])
