"""OpenAI's Responses API on a real gateway with a real model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.event_lines import events_of
from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.responses.test_responses_answer import Client

Json = dict[str, Any]
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
VERDICT = {
    "type": "json_schema",
    "name": "verdict",
    "strict": True,
    "schema": {
        "type": "object",
        "properties": {"verdict": {"enum": ["yes", "no"]}},
        "required": ["verdict"],
        "additionalProperties": False,
    },
}
QUIET = {"effort": "none"}


def body_of(given: Any, **fields: Any) -> Json:
    return {"model": "tiny", "temperature": 0, "input": given, **fields}


def whole(gateway: GatewayProcess, given: Any, **fields: Any) -> Json:
    answer = gateway.client.post("/v1/responses", json=body_of(given, **fields))
    assert answer.status_code == 200, answer.text
    response: Json = answer.json()
    return response


def streamed(gateway: GatewayProcess, given: Any, **fields: Any) -> list[Json]:
    body = body_of(given, **fields, stream=True)
    with gateway.client.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        return list(events_of(answer.iter_lines()))


def text_of(response: Json) -> str:
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


def plain(items: list[Json]) -> list[Json]:
    return [item | {"id": "", "call_id": ""} for item in items]


@pytest.mark.parametrize(
    ("text", "fields", "kinds", "status"),
    [
        ("What is the capital of Peru?", {}, ["message"], "completed"),
        ("What is 7 plus 5?", {}, ["reasoning", "message"], "completed"),
        (
            "What is the weather in Paris and Rome?",
            {"tools": [WEATHER]},
            ["function_call", "function_call"],
            "completed",
        ),
        ("Count to 20.", {"max_output_tokens": 5}, ["message"], "incomplete"),
    ],
)
def test_a_stream_adds_up_to_the_whole_response(
    gateway: GatewayProcess, text: str, fields: Json, kinds: list[str], status: str
) -> None:
    answer = whole(gateway, text, **fields)
    assert [item["type"] for item in answer["output"]] == kinds
    assert answer["status"] == status
    events = streamed(gateway, text, **fields)
    client = Client()
    for event in events:
        client.read(event)
    assert events[-1]["type"] == f"response.{status}"
    assert events[-1]["response"]["output"] == client.items
    assert plain(client.items) == plain(answer["output"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for name in ("input_tokens", "output_tokens", "output_tokens_details"):
        assert events[-1]["response"]["usage"][name] == answer["usage"][name]


def test_a_call_and_its_output_lead_to_an_answer(gateway: GatewayProcess) -> None:
    question = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = whole(gateway, question, tools=[WEATHER])
    (call,) = [item for item in asked["output"] if item["type"] == "function_call"]
    assert json.loads(call["arguments"]) == {"city": "Oslo"}
    result = {"type": "function_call_output", "call_id": call["call_id"]}
    result["output"] = '{"temperature": 21}'
    resent = whole(gateway, [*question, *asked["output"], result], tools=[WEATHER])
    assert text_of(resent) == "It is 21 degrees in Oslo."
    # The same with the stored response: the prompt is the same, token for token.
    continued = whole(gateway, [result], tools=[WEATHER], previous_response_id=asked["id"])
    assert text_of(continued) == text_of(resent)
    assert continued["usage"]["input_tokens"] == resent["usage"]["input_tokens"]


def test_a_stored_item_is_referred_to_by_its_id(gateway: GatewayProcess) -> None:
    name: Json = {"role": "user", "content": "My name is Anna."}
    first = whole(gateway, [name])
    path = f"/v1/responses/{first['id']}/input_items"
    sent = gateway.client.get(path).json()["data"]
    question = {"role": "user", "content": "What is my name?"}
    kept = [{"type": "item_reference", "id": item["id"]} for item in sent + first["output"]]
    answer = whole(gateway, [*kept, question])
    resent = whole(gateway, [name, *first["output"], question])
    assert text_of(answer) == text_of(resent)
    assert answer["usage"]["input_tokens"] == resent["usage"]["input_tokens"]
    # Its input is listed as items with their own ids.
    items = gateway.client.get(
        f"/v1/responses/{answer['id']}/input_items", params={"order": "asc"}
    ).json()["data"]
    assert items[:-1] == sent + first["output"]
    counted = gateway.client.post(
        "/v1/responses/input_tokens", json={"model": "tiny", "input": [*kept, question]}
    ).json()
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_continues_from_a_stored_response(
    gateway: GatewayProcess, streams: bool
) -> None:
    name = {"role": "user", "content": "My name is Anna."}
    first = streamed(gateway, [name])[-1]["response"] if streams else whole(gateway, [name])
    question = "What is my name?"
    continued = whole(gateway, question, previous_response_id=first["id"])
    assert continued["previous_response_id"] == first["id"]
    resent = whole(gateway, [name, *first["output"], {"role": "user", "content": question}])
    assert text_of(continued) == text_of(resent)
    assert continued["usage"]["input_tokens"] == resent["usage"]["input_tokens"]
    assert "Anna" in text_of(continued)


def test_stored_responses_exist_until_they_are_deleted(gateway: GatewayProcess) -> None:
    first = whole(gateway, "Hello!", metadata={"a": "b"})
    second = whole(gateway, "Who are you?", previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}"
    assert gateway.client.get(path).json() == second
    listed = gateway.client.get(f"{path}/input_items", params={"order": "asc"}).json()
    assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]
    assert listed["data"][1] == first["output"][0]
    page = gateway.client.get(
        f"{path}/input_items", params={"limit": 1, "after": listed["data"][2]["id"]}
    ).json()
    assert [item["id"] for item in page["data"]] == [listed["data"][1]["id"]]
    assert page["has_more"] is True
    deleted = gateway.client.delete(path)
    assert deleted.json() == {"id": second["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        missing = gateway.client.request(method, path)
        assert missing.status_code == 404
        assert missing.json()["error"]["param"] == "response_id"


@pytest.mark.parametrize(
    ("path", "name"),
    [("", "starting_after"), ("", "include[]"), ("/input_items", "before")],
)
def test_an_unknown_query_parameter_is_listed(
    gateway: GatewayProcess, path: str, name: str
) -> None:
    """OpenAI's clients also send `include` when they fetch a stored response."""
    response = whole(gateway, "Hello!", max_output_tokens=1)
    address = f"/v1/responses/{response['id']}{path}"
    answer = gateway.client.get(address, params={name: "3"})
    assert answer.json() == gateway.client.get(address).json()
    assert answer.headers["x-ignored-fields"] == name


def test_a_response_that_is_not_stored_cannot_be_continued(gateway: GatewayProcess) -> None:
    response = whole(gateway, "Hello!", store=False)
    answer = gateway.client.post(
        "/v1/responses", json=body_of("hi", previous_response_id=response["id"])
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "previous_response_id"
    assert gateway.client.get(f"/v1/responses/{response['id']}").status_code == 404


def test_the_only_model_need_not_be_named(gateway: GatewayProcess) -> None:
    answer = whole(gateway, "Hello!", model=None)
    assert (answer["model"], text_of(answer)) == ("tiny", "Hello! How can I help you?")
    kept = gateway.client.get(f"/v1/responses/{answer['id']}").json()
    assert kept["model"] == "tiny"
    counted = gateway.client.post("/v1/responses/input_tokens", json={"input": "Hello!"}).json()
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]


def test_instructions_are_not_inherited(gateway: GatewayProcess) -> None:
    first = whole(gateway, "Hello!", instructions="Be brief. " * 20)
    second = whole(gateway, "Who are you?", previous_response_id=first["id"])
    assert second["instructions"] is None
    assert second["usage"]["input_tokens"] < first["usage"]["input_tokens"]


def test_log_probabilities_come_with_the_text(gateway: GatewayProcess) -> None:
    include = ["message.output_text.logprobs"]
    answer = whole(gateway, "Hello!", include=include, top_logprobs=2)
    part = answer["output"][0]["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert all("id" not in entry for entry in part["logprobs"])
    events = streamed(gateway, "Hello!", include=include)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    tokens = [entry["token"] for event in deltas for entry in event["logprobs"]]
    assert tokens == [entry["token"] for entry in part["logprobs"]]


def test_log_probabilities_of_the_text_exclude_the_reasoning(gateway: GatewayProcess) -> None:
    include = ["message.output_text.logprobs"]
    answer = whole(gateway, "What is 7 plus 5?", include=include)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    part = answer["output"][1]["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    events = streamed(gateway, "What is 7 plus 5?", include=include)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    tokens = [entry["token"] for event in deltas for entry in event["logprobs"]]
    assert tokens == [entry["token"] for entry in part["logprobs"]]


def test_an_answer_satisfies_its_schema(gateway: GatewayProcess) -> None:
    answer = whole(gateway, "Is Paris in France?", text={"format": VERDICT}, reasoning=QUIET)
    assert json.loads(text_of(answer))["verdict"] in ("yes", "no")
    assert answer["text"]["format"] == VERDICT


def test_effort_can_turn_reasoning_off(gateway: GatewayProcess) -> None:
    answer = whole(gateway, "What is 7 plus 5?", reasoning=QUIET)
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
    ],
)
def test_a_required_call_is_made(gateway: GatewayProcess, choice: Any) -> None:
    answer = whole(gateway, "Hello!", tools=[WEATHER], tool_choice=choice)
    assert answer["output"][-1]["type"] == "function_call"
    assert answer["tool_choice"] == choice


def test_counted_tokens_equal_those_of_the_prompt(gateway: GatewayProcess) -> None:
    body = {"model": "tiny", "input": "Tell me a story.", "instructions": "Be brief."}
    counted = gateway.client.post("/v1/responses/input_tokens", json=body).json()
    answer = whole(gateway, body["input"], instructions="Be brief.", max_output_tokens=1)
    assert counted["object"] == "response.input_tokens"
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "nobody"}, "model"),
        ({"foo": 1}, "foo"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].id"),
        (
            {"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]},
            "tool_choice.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": "word " * 3000}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        (
            {"text": {"format": VERDICT | {"schema": {"type": "nonsense"}}}},
            "text.format",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(
    strict_gateway: GatewayProcess, fields: Json, param: str, stream: bool
) -> None:
    answer = strict_gateway.client.post("/v1/responses", json=body_of("hi", stream=stream) | fields)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error


def test_a_compacted_conversation_goes_on(gateway: GatewayProcess) -> None:
    told = [
        {"role": "user", "content": "My name is Ida."},
        {"role": "assistant", "content": "Hello Ida!"},
    ]
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "blue"}
    body = {"model": "tiny", "input": [*told, call, result], "tools": [WEATHER]}
    answer = gateway.client.post("/v1/responses/compact", json=body)
    assert answer.status_code == 200, answer.text
    compacted = answer.json()
    assert compacted["object"] == "response.compaction"
    assert compacted["usage"]["output_tokens"] > 0
    (item,) = compacted["output"]
    assert item["type"] == "compaction"
    more = [item, {"role": "user", "content": "What is my name?"}]
    counted = {
        name: gateway.client.post(
            "/v1/responses/input_tokens", json={"model": "tiny", "input": items}
        ).json()["input_tokens"]
        for name, items in {"with": more, "without": more[1:]}.items()
    }
    assert counted["with"] > counted["without"]
    body = body_of(more, store=True, max_output_tokens=4)
    first = gateway.client.post("/v1/responses", json=body).json()
    assert first["status"] in ("completed", "incomplete"), first
    again = body | {"input": "And?", "previous_response_id": first["id"]}
    assert gateway.client.post("/v1/responses", json=again).status_code == 200


def test_a_conversation_longer_than_the_context_is_compacted_in_parts(
    gateway: GatewayProcess,
) -> None:
    turn = [{"role": "user", "content": "tick " * 100}, {"role": "assistant", "content": "tick"}]
    body = {"model": "tiny", "input": turn * 12, "temperature": 0}
    refused = gateway.client.post("/v1/responses", json=body)
    assert "prompt is too long" in refused.json()["error"]["message"]
    answer = gateway.client.post("/v1/responses/compact", json=body)
    assert answer.status_code == 200, answer.text
    compacted = answer.json()
    (item,) = compacted["output"]
    again = gateway.client.post("/v1/responses", json=body_of([item, *turn], max_output_tokens=4))
    assert again.status_code == 200, again.text
    assert compacted["usage"]["input_tokens"] > again.json()["usage"]["input_tokens"]


def test_one_message_longer_than_the_context_is_not_compacted(gateway: GatewayProcess) -> None:
    body = {"model": "tiny", "input": "tick " * 20_000}
    answer = gateway.client.post("/v1/responses/compact", json=body)
    assert answer.status_code == 400
    assert "prompt is too long" in answer.json()["error"]["message"]


def test_tools_among_the_items_are_offered(gateway: GatewayProcess) -> None:
    added = {"type": "additional_tools", "tools": [WEATHER]}
    sent = {"role": "user", "content": "Look."}
    body = {"model": "tiny", "input": [added, sent], "max_output_tokens": 64}
    answer = gateway.client.post("/v1/responses", json=body | {"tool_choice": "required"})
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    (call,) = [item for item in answer.json()["output"] if item["type"] == "function_call"]
    assert call["name"] == WEATHER["name"]
