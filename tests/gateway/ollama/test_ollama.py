"""Ollama's API, as its clients use it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from common.device_memory import has_graphics
from gateway.ollama.request import ChatRequest, chat_request
from tests.gateway.asking import ADDITION, WEATHER, user_message
from tests.gateway.gateway_process import TINY_TEXT, GatewayProcess, tiny
from tests.gateway.numbers_backend import NumbersBackend
from tests.gateway.requests_begun import begun
from tests.polling import until

Json = dict[str, Any]
COLD = {"temperature": 0}


def ask(gateway: GatewayProcess, path: str, **fields: Any) -> Json:
    """A whole answer."""
    body = {"model": "tiny:latest", "stream": False, "options": COLD, **fields}
    answer = gateway.client.post(f"/api/{path}", json=body)
    assert answer.status_code == 200, answer.text
    response: Json = answer.json()
    return response


def lines(gateway: GatewayProcess, path: str, **fields: Any) -> list[Json]:
    """The lines of a stream."""
    body = {"model": "tiny", "options": COLD, **fields}
    with gateway.client.stream("POST", f"/api/{path}", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.iter_lines()]


def test_a_chat_whole_and_in_lines(gateway: GatewayProcess) -> None:
    whole = ask(gateway, "chat", messages=user_message(ADDITION))
    assert whole["message"]["content"] == "7 + 5 = 12"
    assert "find 7 plus 5" in whole["message"]["thinking"]
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    assert whole["prompt_eval_count"] > 0
    assert whole["eval_count"] > 0
    parts = lines(gateway, "chat", messages=user_message(ADDITION))
    assert "".join(line["message"]["content"] for line in parts) == "7 + 5 = 12"
    assert [line["done"] for line in parts] == [False] * (len(parts) - 1) + [True]


def test_messages_in_the_forms_of_other_programs(gateway: GatewayProcess) -> None:
    """The Vercel SDK's empty content, OpenAI's parts, and Continue's messages of thinking."""
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "7 + 5?"}]
    told = [{"role": "thinking", "content": "Hm."}, {"role": "assistant", "content": []}]
    asked = {"messages": [*user_message("Hi"), *told, {"role": "user", "content": parts}]}
    plain = [*user_message("Hi"), {"role": "assistant"}, *user_message("What is 7 + 5?")]
    body = {"model": "tiny", "stream": False, "options": COLD}
    answer = gateway.client.post("/api/chat", json=body | asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == "messages[][thinking]"
    expected = ask(gateway, "chat", messages=plain)
    assert answer.json()["message"] == expected["message"]
    assert answer.json()["prompt_eval_count"] == expected["prompt_eval_count"]
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    refused = gateway.client.post(
        "/api/chat", json=body | {"messages": [{"role": "user", "content": picture}]}
    )
    assert refused.status_code == 400
    assert "messages[0].content" in refused.json()["error"]


def test_a_prompt_with_and_without_the_template(gateway: GatewayProcess) -> None:
    asked = {"prompt": ADDITION, "think": False, "system": "Be brief."}
    assert "12" in ask(gateway, "generate", **asked)["response"]
    parts = lines(gateway, "generate", **asked)
    assert "12" in "".join(line["response"] for line in parts)
    raw = ask(gateway, "generate", prompt="1 2 3", raw=True, options={**COLD, "num_predict": 3})
    assert (raw["done_reason"], raw["eval_count"]) == ("length", 3)


def test_a_raw_prompt_honours_or_names_every_field(gateway: GatewayProcess) -> None:
    body: Json = {"model": "tiny", "prompt": "1 2 3", "raw": True, "stream": False}
    form = {"type": "object", "properties": {"x": {"const": 7}}, "required": ["x"]}
    body["options"] = {**COLD, "num_predict": -2}  # no limit
    answer = gateway.client.post("/api/generate", json=body | {"format": form, "think": True})
    assert json.loads(answer.json()["response"]) == {"x": 7}
    assert answer.headers["x-ignored-fields"] == "think"
    for name, value in {"system": "Be brief.", "images": ["AAAA"], "options": {"n": 2}}.items():
        refused = gateway.client.post("/api/generate", json=body | {name: value})
        assert refused.status_code == 400
        assert refused.json()["error"].startswith(name)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_turn(gateway: GatewayProcess, stream: bool) -> None:
    messages: list[Json] = user_message("What is the weather in Paris?")
    asked = {"messages": messages, "tools": [WEATHER]}
    if stream:
        parts = [line["message"] for line in lines(gateway, "chat", **asked)]
        (message,) = [each for each in parts if "tool_calls" in each]
    else:
        message = ask(gateway, "chat", **asked)["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert call["function"]["arguments"] == {"city": "Paris"}
    assert call["id"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "18 degrees, sunny"}
    body = {"model": "tiny", "messages": [*messages, message, result], "tools": [WEATHER]}
    after = gateway.client.post("/api/chat", json=body | {"stream": False, "options": COLD})
    assert "x-ignored-fields" not in after.headers
    said_then = after.json()["message"]["content"]
    assert "Paris" in said_then or "18" in said_then


def test_a_call_may_be_required_although_ollamas_own_api_cannot(gateway: GatewayProcess) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        asked = {"messages": user_message("Say hi"), "tools": [WEATHER], "tool_choice": choice}
        assert ask(gateway, "chat", **asked)["message"]["tool_calls"], choice


@pytest.mark.parametrize("field", ["tool_name", "name"])
def test_a_result_names_its_tool(field: str) -> None:
    """By OpenAI's name of the field as well, as LobeChat and Semantic Kernel do."""
    running = begun()
    sent = [*user_message("x"), {"role": "tool", "content": "1", field: "look"}]
    asked = chat_request(ChatRequest.model_validate({"model": "m", "messages": sent}))
    assert asked is not None
    assert asked.chat.messages[1].name == "look"
    assert running.ignored == {}


def test_a_format_of_the_answer(gateway: GatewayProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = ask(gateway, "chat", messages=user_message("Yes?"), format=schema, think=False)
    assert isinstance(json.loads(answer["message"]["content"])["a"], bool), answer


def test_lists_of_models(gateway: GatewayProcess) -> None:
    (model,) = gateway.client.get("/api/tags").json()["models"]
    assert (model["name"], model["model"]) == ("tiny", "tiny")
    shown = gateway.client.post("/api/show", json={"model": "tiny"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["mlx.context_length"] == 1024
    assert gateway.client.get("/api/version").json()["version"]


def test_an_empty_request_loads_and_unloads(gateway: GatewayProcess) -> None:
    assert ask(gateway, "generate")["done_reason"] == "load"
    assert gateway.backends()
    (loaded,) = gateway.client.get("/api/ps").json()["models"]
    assert (loaded["name"], loaded["size"] > 0) == ("tiny", True)
    assert ask(gateway, "chat", messages=[], keep_alive=0)["done_reason"] == "unload"
    assert not gateway.backends()
    assert gateway.client.get("/api/ps").json() == {"models": []}


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_is_unloaded_after_an_answer_that_asks_for_it(
    gateway: GatewayProcess, stream: bool
) -> None:
    asked = {"messages": user_message(ADDITION), "think": False}
    body = {"model": "tiny", "stream": stream, "options": COLD, **asked}
    longer = gateway.client.post("/api/chat", json=body | {"keep_alive": "5m"})
    assert (longer.status_code, longer.headers["x-ignored-fields"]) == (200, "keep_alive")
    assert gateway.client.get("/api/ps").json()["models"]
    answer = gateway.client.post("/api/chat", json=body | {"keep_alive": 0})
    assert json.loads(answer.text.splitlines()[-1])["done_reason"] == "stop"
    assert gateway.client.get("/api/ps").json() == {"models": []}


def test_a_loaded_model_has_the_fields_of_ollamas_command() -> None:
    """Without `expires_at` its list says `Stopping...`, and it compares `size_vram` with `size`."""
    models = {"quick": tiny(idle_unload=300), "lasting": tiny(idle_unload=0)}
    gateway = GatewayProcess(models)
    try:
        for name in models:
            gateway.client.post("/api/generate", json={"model": name})
        quick, lasting = sorted(
            gateway.client.get("/api/ps").json()["models"], key=lambda one: one["expires_at"]
        )
    finally:
        gateway.close()
    assert (quick["name"], lasting["name"]) == ("quick", "lasting")
    left = datetime.fromisoformat(quick["expires_at"]) - datetime.now(UTC)
    assert 0 < left.total_seconds() < 301
    assert datetime.fromisoformat(lasting["expires_at"]).year > 2100
    assert quick["context_length"] == 1024
    assert quick["size_vram"] == (quick["size"] if has_graphics() else 0)


def test_a_model_is_copied_and_removed() -> None:
    gateway = GatewayProcess({"tiny": tiny(aliases=["other"], preload=False)})
    folder = gateway.models_dir

    def names() -> list[str]:
        return [one["name"] for one in gateway.client.get("/api/tags").json()["models"]]

    def removed(name: str) -> httpx.Response:
        return gateway.client.request("DELETE", "/api/delete", json={"model": name})

    def copied(source: str, destination: str) -> httpx.Response:
        asked = {"source": source, "destination": destination}
        return gateway.client.post("/api/copy", json=asked)

    try:
        assert copied("other", "second:latest").status_code == 200
        assert names() == ["second", "tiny"]
        assert ask(gateway, "generate", model="second", prompt=ADDITION, think=False)["done"]
        for source, destination, word in (
            ("tiny", "tiny", "another model"),
            ("tiny", "SECOND", "another model"),
            ("tiny", "../x", "use letters"),
            ("none", "third", "does not exist"),
        ):
            refused = copied(source, destination)
            assert refused.status_code in (400, 404)
            assert word in refused.json()["error"]
        assert removed("other").status_code == 200
        assert names() == ["second"]
        assert (folder / ".tiny.yaml").exists()
        assert removed("tiny").status_code == 404
        assert gateway.client.delete("/api/delete").status_code == 400
        (folder / "bare").symlink_to(TINY_TEXT)
        until(lambda: names() == ["second", "bare"])
        assert removed("bare").status_code == 200
        assert names() == ["second"]
    finally:
        gateway.close()


def test_models_stay_as_they_are_if_there_are_several_keys() -> None:
    gateway = GatewayProcess(
        {"tiny": tiny()}, MLX_GATEWAY_API_KEYS="a-first-key-of-two,a-second-key"
    )
    try:
        asked = {"source": "tiny", "destination": "second", "model": "tiny"}
        for method, path in (("POST", "/api/copy"), ("DELETE", "/api/delete")):
            headers = {"x-api-key": "a-second-key"}
            answer = gateway.client.request(method, path, json=asked, headers=headers)
            assert (answer.status_code, "several API keys" in answer.json()["error"]) == (403, True)
        assert [file.name for file in gateway.models_dir.iterdir()] == ["tiny.yaml"]
    finally:
        gateway.close()


def test_an_unset_context_is_not_sent() -> None:
    """Clients use any number they find under a key with `context_length`."""
    model = NumbersBackend()
    gateway = GatewayProcess({"m": {"parameters": {"model": "m"}, "address": model.address}})
    try:
        shown = gateway.client.post("/api/show", json={"model": "m"}).json()
        assert shown["model_info"] == {"general.architecture": "mlx", "general.basename": "m"}
        assert shown["parameters"] == ""
        answer = ask(gateway, "embed", model="m", input=["ab", "abc"], dimensions=1)
        assert answer["embeddings"] == [[1.0], [1.0]]
        assert answer["prompt_eval_count"] == 5
        assert answer["total_duration"] > 0  # ollama-ai-provider-v2 reads nothing without both
        assert answer["load_duration"] == 0
        [[*whole]] = ask(gateway, "embed", model="m", input="ab")["embeddings"]
        assert ask(gateway, "embeddings", model="m", prompt="ab") == {"embedding": whole}
        empty = gateway.client.post("/api/embeddings", json={"model": "m", "prompt": ""})
        assert (empty.status_code, "prompt" in empty.json()["error"]) == (400, True)
    finally:
        gateway.close()
        model.close()


@pytest.mark.parametrize(
    ("fields", "words", "status"),
    [
        ({"model": "absent", "prompt": "Hi"}, "absent", 404),
        ({"prompt": "Hi", "suffix": "x"}, "no tokens for that", 400),
        ({"prompt": "Hi", "options": {"temperature": "hot"}}, "options.temperature", 400),
        ({"prompt": "Hi", "format": {"type": "nothing"}}, "format", 400),
    ],
)
def test_refusals_are_sentences(
    gateway: GatewayProcess, fields: Json, words: str, status: int
) -> None:
    body = {"model": "tiny", "stream": False, **fields}
    answer = gateway.client.post("/api/generate", json=body)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (
            "chat",
            {"messages": [*user_message("Hi"), {"role": "user", "images": ["AAAA"]}]},
            "messages[1].images[0]",
        ),
        ("generate", {"prompt": "Hi", "system": "Hi", "images": ["AAAA"]}, "images[0]"),
    ],
)
def test_refusals_name_the_field_that_was_sent(
    gateway: GatewayProcess, path: str, fields: Json, place: str
) -> None:
    answer = gateway.client.post(f"/api/{path}", json={"model": "tiny", **fields})
    assert answer.status_code == 400
    message = answer.json()["error"]
    assert message.startswith(f"{place} is ")


def test_ignored_fields_are_listed(gateway: GatewayProcess) -> None:
    body = {
        "model": "tiny",
        "messages": user_message("Hi"),
        "options": {"num_ctx": 1, "num_predict": 2},
    }
    others = {"truncate": True, "top_logprobs": 2}  # alternatives need logprobs
    answer = gateway.client.post("/api/chat", json={**body, "stream": False, **others})
    assert answer.json()["done_reason"] == "length"
    ignored = set(answer.headers["x-ignored-fields"].split(","))
    assert ignored == {"options.num_ctx", *others}


@pytest.mark.parametrize("path", ["chat", "generate", "raw"])
def test_log_probabilities_whole_and_in_lines(gateway: GatewayProcess, path: str) -> None:
    asked: Json = {"logprobs": True, "top_logprobs": 2, "options": {**COLD, "num_predict": 5}}
    if path == "chat":
        asked["messages"] = user_message(ADDITION)
    else:
        asked |= {"prompt": "1 2 3", "raw": path == "raw"}
        path = "generate"
    whole = ask(gateway, path, **asked)["logprobs"]
    assert len(whole) == 5
    for entry in whole:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] < 0
    parts = lines(gateway, path, **asked)
    sent = [entry for part in parts for entry in part.get("logprobs", ())]
    assert [entry["bytes"] for entry in sent] == [entry["bytes"] for entry in whole]
    assert "logprobs" not in ask(gateway, path, **{**asked, "logprobs": False})
