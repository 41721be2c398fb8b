"""What programs ask of servers of LM Studio, llama.cpp and others; Cursor's bodies for chats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.speech.tiny_speech import write_whisper
from tests.gateway.asking import ADDITION, chat, chunks, message, user_message
from tests.gateway.gateway_process import TINY_TEXT, GatewayProcess, tiny
from tests.gateway.responses.test_responses import WEATHER as FLAT_WEATHER

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


def test_the_context_of_a_loaded_model_is_what_memory_holds() -> None:
    scarce = GatewayProcess({"tiny": tiny(context_size=0, options=["memory_limit_mib:8"])})
    try:
        (card,) = get(scarce, "/v1/models")["data"]
        own = card["context_length"]
        chat(scarce, max_tokens=2)
        (card,) = get(scarce, "/v1/models")["data"]
        context = card["context_length"]
        assert 0 < context < own
        reason = card["meta"]["context_reason"]
        assert re.match(rf"\d+ MiB are left for KV, too few for the {own} tokens", reason)
        assert get(scarce, "/props")["default_generation_settings"]["n_ctx"] == context
        long = {"model": "tiny", "messages": user_message("word " * own)}
        refused = scarce.client.post("/v1/chat/completions", json=long)
        assert refused.status_code == 400
        assert f"length is {context} tokens" in refused.json()["error"]["message"]
    finally:
        scarce.close()


def test_a_smaller_context_in_the_file_counts(gateway: GatewayProcess) -> None:
    card = get(gateway, "/v1/models/tiny")
    assert card["context_length"] == card["max_model_len"] == 1024
    chat(gateway, max_tokens=2)
    card = get(gateway, "/v1/models/tiny")
    assert card["meta"]["context_reason"] == "configured; the model's own is 8192"


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


def test_lm_studio_lists_no_model_of_another_kind(tmp_path: Path) -> None:
    whisper = {"parameters": {"model": str(write_whisper(tmp_path / "whisper"))}}
    process = GatewayProcess({"tiny": tiny(), "whisper": whisper})
    try:
        for path, key in (("v0", "data"), ("v1", "models")):
            listed = process.client.get(f"/api/{path}/models").json()[key]
            assert [card["key"] for card in listed] == ["tiny"]
        ids = {card["id"] for card in process.client.get("/v1/models").json()["data"]}
        assert ids == {"tiny", "whisper"}
    finally:
        process.close()


def test_llama_cpp_lists_adapters() -> None:
    process = GatewayProcess({"tiny": tiny(adapters={"terse": "folder"}), "bare": tiny()})
    try:
        listed = [{"id": 0, "path": "terse", "scale": 0.0}]
        assert process.client.get("/lora-adapters?model=tiny").json() == listed
        assert process.client.get("/v1/lora-adapters?model=bare").json() == []
    finally:
        process.close()


def test_llama_cpp_lists_its_slots(unlimited: GatewayProcess) -> None:
    """Before the model is loaded, and while it answers."""
    idle: Any = get(unlimited, "/slots?model=tiny")
    assert [slot["id"] for slot in idle] == list(range(32))
    assert {slot["is_processing"] for slot in idle} == {False}
    (card,) = get(unlimited, "/v1/models")["data"]
    assert {slot["n_ctx"] for slot in idle} == {card["context_length"]}
    endless = {"prompt": "a", "ignore_eos": True, "max_tokens": -1, "stream": True}
    with unlimited.client.stream("POST", "/v1/completions", json=endless) as answer:
        arriving = answer.iter_lines()  # if it is freed, the response is closed
        next(arriving)
        busy: Any = get(unlimited, "/v1/slots")
    assert [slot["id"] for slot in busy if slot["is_processing"]] == [0]
    assert unlimited.client.get("/slots?model=nobody").status_code == 404


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
    counted = asked | {"stream_options": {"include_usage": True}}
    assert chunks(gateway, "/v1/chat/completions", counted)[-1]["usage"]["completion_tokens"] > 0
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
    """Home Assistant sends this request before it uses a model."""
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


def test_lm_studio_loads_and_unloads_a_model(gateway: GatewayProcess) -> None:
    """AnythingLLM and others use this newer API, also to find out which models are loaded."""
    assert gateway.client.post("/api/v1/models/unload", json={"instance_id": "tiny"}).json() == {
        "instance_id": "tiny"
    }
    (before,) = get(gateway, "/api/v1/models")["models"]
    assert (before["key"], before["type"], before["loaded_instances"]) == ("tiny", "llm", [])
    assert before["capabilities"] == {"vision": False, "trained_for_tool_use": True}
    assert before["max_context_length"] == 1024
    assert before["size_bytes"] > 0
    asked = {"model": "tiny", "context_length": 512}
    loaded = gateway.client.post("/api/v1/models/load", json=asked)
    assert loaded.headers["x-ignored-fields"] == "context_length"
    assert (loaded.json()["instance_id"], loaded.json()["status"]) == ("tiny", "loaded")
    assert loaded.json()["load_time_seconds"] > 0
    (after,) = get(gateway, "/api/v1/models")["models"]
    assert after["loaded_instances"] == [{"id": "tiny", "config": {"context_length": 1024}}]
    assert get(gateway, "/api/v1/models")["data"][0]["id"] == "tiny"  # OpenAI's form
    unknown = gateway.client.post("/api/v1/models/load", json={"model": "nobody"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/ping", "/version", "/api/v1/health", "/api/v1/props"])
def test_programs_find_that_the_server_runs(gateway: GatewayProcess, path: str) -> None:
    assert get(gateway, path)


@pytest.mark.parametrize("path", ["/reranking", "/v1/reranking", "/v2/rerank", "/api/v1/reranking"])
def test_rerank_has_the_paths_of_other_servers(gateway: GatewayProcess, path: str) -> None:
    """This model cannot rank, so it refuses the request; an unknown path would give 404."""
    asked = {"model": "tiny", "query": "a", "documents": ["b"], "max_tokens_per_doc": 4096}
    answer = gateway.client.post(path, json=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")


def test_a_chat_of_no_tokens_warms_the_cache_up(gateway: GatewayProcess) -> None:
    """llama.vim sends this while the user writes an instruction."""
    warm = {"n_predict": 0, "samplers": [], "id_slot": 0, "response_fields": [""], "model": ""}
    whole = chat(gateway, **warm)
    (choice,) = whole["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["usage"]["prompt_tokens"] > 0
    parts = chunks(gateway, "/v1/chat/completions", {"messages": user_message(ADDITION), **warm})
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    # In Ollama's API, 0 means no limit.
    assert "12" in message(gateway, options={"num_predict": 0})["content"]


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/chat/completions", {"messages": user_message(ADDITION)}, "max_tokens"),
        ("/v1/chat/completions", {"messages": user_message(ADDITION)}, "max_completion_tokens"),
        ("/v1/responses", {"input": ADDITION}, "max_output_tokens"),
    ],
)
def test_a_limit_beyond_every_context_is_reduced(
    gateway: GatewayProcess, path: str, fields: Json, name: str
) -> None:
    """Some programs send JavaScript's largest integer when they mean no limit."""
    answer = gateway.client.post(path, json={"model": "tiny", **fields, name: 2**53 - 1})
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, name), answer.text


def test_llama_cpp_s_completion_has_log_probabilities(gateway: GatewayProcess) -> None:
    """SillyTavern shows them. It also sends limits under two names, as here."""
    asked: Json = {
        "model": "tiny",
        "prompt": "Count to 3.",
        "n_predict": 4,
        "max_tokens": 4,
        "n_probs": 3,
        "logprobs": 3,
        "temperature": 0,
        "grammar": "",
        "guided_grammar": "",
        "logit_bias": [[1, False]],
        "samplers": ["top_k", "temperature"],
        "dry_multiplier": 0.8,
        "ignore_eos": True,
    }
    whole = gateway.client.post("/completion", json=asked)
    assert whole.status_code == 200, whole.text
    tokens = whole.json()["completion_probabilities"]
    assert "".join(token["token"] for token in tokens) == whole.json()["content"]
    assert all(len(token["top_logprobs"]) == 3 for token in tokens)
    with gateway.client.stream("POST", "/completion", json=asked | {"stream": True}) as answer:
        parts = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    streamed = [each for part in parts for each in part.get("completion_probabilities", ())]
    assert [each["id"] for each in streamed] == [each["id"] for each in tokens]
    del asked["n_probs"], asked["logprobs"]
    plain = gateway.client.post("/completion", json=asked).json()
    assert (plain["content"], "completion_probabilities" in plain) == (
        whole.json()["content"],
        False,
    )


def test_a_response_ends_at_a_stop_string(gateway: GatewayProcess) -> None:
    asked: Json = {"model": "tiny", "input": ADDITION, "temperature": 0, "max_output_tokens": -1}
    asked["reasoning"] = {"effort": "none"}
    whole = gateway.client.post("/v1/responses", json=asked).json()
    text = whole["output"][-1]["content"][0]["text"]
    cut = gateway.client.post("/v1/responses", json=asked | {"stop": [text[3:5]]})
    assert cut.status_code == 200, cut.text
    assert cut.json()["output"][-1]["content"][0]["text"] == text[: text.index(text[3:5])]


@pytest.mark.parametrize("path", ["/embeddings", "/embedding", "/v1/embeddings"])
def test_embeddings_in_llama_cpps_form(gateway: GatewayProcess, path: str) -> None:
    """Tabby sends `content`, and expects a list of lists."""
    both = ["a", "b c"]
    answer = gateway.client.post("/v1/embeddings", json={"model": "tiny", "input": both})
    vectors = [entry["embedding"] for entry in answer.json()["data"]]
    found = gateway.client.post(path, json={"content": both[0]})
    assert found.status_code == 200, found.text
    several = gateway.client.post(path, json={"content": both}).json()
    named = gateway.client.post(path, json={"content": both, "input": "a"})
    assert len(named.json()["data"]) == 1
    assert named.headers["x-ignored-fields"] == "content"
    packed = gateway.client.post(path, json={"content": "a", "encoding_format": "base64"}).json()
    assert isinstance(packed[0]["embedding"][0], str)
    assert [entry["index"] for entry in several] == [0, 1]
    # The shape of a batch changes the last digits of sums.
    close = [pytest.approx(vector, abs=1e-5) for vector in vectors]
    assert [*several[0]["embedding"], *several[1]["embedding"]] == close
    assert found.json()[0]["embedding"] == close[:1]
    missing = gateway.client.post(path, json={"model": "tiny"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("/v1/models?limit=1&verbose=1", "verbose"),
        ("/v1/messages?beta=true", None),
        ("/v1/chat/completions?api-version=2026-01-01&stream=true", "stream"),
        ("/metrics?name=x", "name"),
    ],
)
def test_a_query_that_has_no_meaning_is_listed(
    gateway: GatewayProcess, path: str, ignored: str | None
) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    post = "messages" in path or "chat" in path
    answer = gateway.client.request("POST" if post else "GET", path, json=asked if post else None)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-ignored-fields") == ignored
