"""Real answers, whole and streamed, checked against the types of the APIs' own SDKs.

The SDKs themselves never check an answer. Here every field that they require must be present, with
its exact type and a known value.
"""

import json
import sys
from functools import cache
from typing import Any

import httpx
from anthropic.types import ErrorResponse, Message, MessageTokensCount, ModelInfo
from anthropic.types import RawMessageStreamEvent as MessageEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import TypeAdapter, ValidationError

client = httpx.Client(base_url=sys.argv[1], timeout=60, trust_env=False)
checked = 0
wrong: list[str] = []


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The validator of a type, built once because that takes longer than all checks."""
    return TypeAdapter(kind)


def check(kind: Any, text: str, what: str) -> None:
    """Record what is wrong with a JSON object."""
    global checked
    checked += 1
    try:
        _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        found = error.errors()[:6]
        wrong.append(f"{what}: {[(each['loc'], each['msg']) for each in found]} in {text[:400]}")


def ask(path: str, whole: Any, event: Any, **fields: Any) -> dict[str, Any]:
    """Ask for an answer whole, which is returned, and as a stream."""
    body = {"model": "tiny", "temperature": 0, **fields}
    what = f"{path} {json.dumps(fields)[:200]}"
    answer = client.post(path, json=body)
    assert answer.status_code == 200, (what, answer.text)
    check(whole, answer.text, what)
    with client.stream("POST", path, json=body | {"stream": True}) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: ") or line in ("data: [DONE]", 'data: {"type": "ping"}'):
                continue
            if path == "/v1/completions":  # OpenAI's own streams have a null that its types omit
                line = line.replace('"finish_reason":null', '"finish_reason":"stop"')
            check(event, line.removeprefix("data: "), f"{what}, streamed")
    found: dict[str, Any] = answer.json()
    return found


def user_message(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": SCHEMA}
COUNT, SUM, WEATHER = "Count to 5.", "What is 7 plus 5?", "What is the weather in Paris?"

chat = ("/v1/chat/completions", ChatCompletion, ChatCompletionChunk)
tools: Any = [{"type": "function", "function": FUNCTION}]
for text in (COUNT, SUM):
    ask(*chat, messages=user_message(text), stream_options={"include_usage": True})
ask(*chat, messages=user_message(COUNT), logprobs=True, top_logprobs=2, n=2)
ask(*chat, messages=user_message(COUNT), max_tokens=2)
ask(*chat, messages=user_message(WEATHER), tools=tools)
ask(*chat, messages=user_message(WEATHER), tools=tools, max_tokens=15)
ask(*chat, messages=user_message(WEATHER), functions=[FUNCTION])

completions = ("/v1/completions", Completion, Completion)
ask(*completions, prompt=["1 2 3", "The capital of France is"], max_tokens=4, logprobs=2)
ask(*completions, prompt="1 2 3", max_tokens=4, echo=True)

responses = ("/v1/responses", Response, ResponseStreamEvent)
tools = [{"type": "function", **FUNCTION}]
custom = {"type": "custom", "name": "get_weather", "description": "The weather in a city."}
for text in (COUNT, SUM):
    results = ask(*responses, input=text, metadata={"a": "b"}, instructions="Be brief.")
ask(*responses, input=COUNT, include=["message.output_text.logprobs"], top_logprobs=2)
ask(*responses, input=COUNT, max_output_tokens=2)
in_json = {"format": {"type": "json_object"}, "verbosity": "low"}
ask(
    *responses, input=COUNT, text=in_json, max_output_tokens=50
)  # this model would not end such an answer
ask(*responses, input=WEATHER, tools=tools)
ask(*responses, input=WEATHER, tools=tools, max_output_tokens=15)
ask(*responses, input=WEATHER, tools=tools, tool_choice={"type": "function", "name": "get_weather"})
ask(*responses, input=WEATHER, tools=[custom], tool_choice="required")
ask(*responses, input=SUM, previous_response_id=results["id"], reasoning={"effort": "low"})
check(Response, client.get(f"/v1/responses/{results['id']}").text, "a stored response")
for item in client.get(f"/v1/responses/{results['id']}/input_items").json()["data"]:
    check(ResponseItem, json.dumps(item), "an item that was given")
counted = client.post("/v1/responses/input_tokens", json={"model": "tiny", "input": COUNT})
check(InputTokenCountResponse, counted.text, "the count of a response's tokens")

messages = ("/v1/messages", Message, MessageEvent)
tools = [{"name": "get_weather", "description": "The weather in a city.", "input_schema": SCHEMA}]
for text in (COUNT, SUM):
    ask(*messages, messages=user_message(text), max_tokens=50)
ask(*messages, messages=user_message(COUNT), max_tokens=50, stop_sequences=["4"])
ask(*messages, messages=user_message(COUNT), max_tokens=2)
ask(*messages, messages=user_message(WEATHER), max_tokens=50, tools=tools)
ask(*messages, messages=user_message(WEATHER), max_tokens=15, tools=tools)
counting = {"model": "tiny", "messages": user_message(COUNT)}
counted = client.post("/v1/messages/count_tokens", json=counting)
check(MessageTokensCount, counted.text, "the count of a message's tokens")
check(ErrorResponse, client.post("/v1/messages", json={}).text, "a refusal")
for card in client.get("/v1/models").json()["data"]:
    check(Model, json.dumps(card), "a model of OpenAI's")
    check(ModelInfo, json.dumps(card), "a model of Anthropic's")
print(json.dumps({"checked": checked, "wrong": wrong}))
