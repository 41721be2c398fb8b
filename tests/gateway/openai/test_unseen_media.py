"""Images in a conversation with a model that accepts only text.

Covers: gateway/openai/messages.py
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.exchange import Exchange
from tests.gateway.asking import user_message
from tests.gateway.gateway_process import TINY_TEXT, GatewayProcess
from tests.gateway.openai.test_chat_to_wire import config_of, translated
from tests.gateway.requests_begun import begun

TEXT = config_of(parameters={"model": str(TINY_TEXT)})
PNG = "data:image/png;base64,iVBORw0KGgo="
IMAGE = {"type": "image_url", "image_url": {"url": PNG}}
SOURCE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"},
}
UNSEEN = "[An image could not be shown: this model accepts only text.]"
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


SHOWN = [user(said("a"), IMAGE, said("b")), {"role": "assistant", "content": "A cat."}]
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": [said("seen"), IMAGE]}
BLOCK = {"type": "tool_result", "tool_use_id": "c1", "content": [said("seen"), SOURCE]}


@pytest.mark.parametrize(
    ("messages", "contents", "ignored"),
    [
        ([*SHOWN, *user_message("So?")], [f"a{UNSEEN}b", "A cat.", "So?"], "[image_url]"),
        ([*user_message("x"), CALLED, RESULT], ["x", "", f"seen\n{UNSEEN}"], "[image_url]"),
        (
            [*user_message("x"), CALLED, user(BLOCK)],
            ["x", "", f"seen\n{UNSEEN}"],
            ".content[][image]",
        ),
        (
            [*user_message("x"), CALLED, user(BLOCK, said("So?"))],
            ["x", "", f"seen\n{UNSEEN}", "So?"],
            ".content[][image]",
        ),
        (
            [*user_message("x"), {"role": "assistant", "content": [IMAGE]}, *user_message("So?")],
            ["x", UNSEEN, "So?"],
            "[image_url]",
        ),
    ],
)
def test_an_image_of_the_history_becomes_a_sentence(
    messages: list[Any], contents: list[str], ignored: str
) -> None:
    exchange = begun()
    (options,) = translated({"messages": messages}, TEXT)
    assert [message.content for message in options.Messages] == contents
    assert not options.Images
    assert list(exchange.ignored) == [f"messages[].content[]{ignored}"]


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"type": "video_url", "video_url": {"url": PNG}}, "[A video could"),
        (
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            "[A recording could",
        ),
        ({"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}, UNSEEN),
    ],
)
def test_other_media_and_remote_images_are_not_read(part: Any, sentence: str) -> None:
    answered = {"role": "assistant", "content": "b"}
    (options,) = translated({"messages": [user(part), answered, *user_message("c")]}, TEXT)
    assert options.Messages[0].content.startswith(sentence)


@pytest.mark.parametrize("after", [[], [CALLED, RESULT]])
def test_an_image_in_the_newest_user_message_is_refused(after: list[Any]) -> None:
    messages = [*SHOWN, user(said("And this?"), IMAGE), *after]
    with pytest.raises(ApiError) as refused:
        translated({"messages": messages}, TEXT)
    assert refused.value.param == "messages[2].content[1].image_url"
    assert refused.value.message.endswith("is not text, and the model tiny accepts only text")


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([*SHOWN, *user_message("So?")], "messages[0].content[1].image_url"),
        ([*user_message("x"), CALLED, user(BLOCK)], "messages[2].content[0].content[1].source"),
    ],
)
def test_strict_refuses_every_image(strict: Exchange, messages: list[Any], place: str) -> None:
    with pytest.raises(ApiError) as refused:
        translated({"messages": messages}, TEXT)
    assert refused.value.param == place


def test_a_conversation_with_images_goes_on_in_every_api(gateway: GatewayProcess) -> None:
    used = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    seen = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": PNG}]
    called = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    ollama = {"role": "user", "content": "x", "images": [PNG.partition(",")[2]]}
    later = [{"role": "assistant", "content": "A cat."}, *user_message("So?")]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [*user_message("x"), CALLED, RESULT]},
        "/v1/messages": {
            "messages": [*user_message("x"), {"role": "assistant", "content": [used]}, user(BLOCK)]
        },
        "/v1/responses": {
            "input": [
                {"role": "user", "content": "x"},
                called,
                {"type": "function_call_output", "call_id": "c1", "output": seen},
            ]
        },
        "/api/chat": {"messages": [ollama, *later], "stream": False},
    }
    for path, body in bodies.items():
        limit = {"max_output_tokens": 4} if path.endswith("responses") else {"max_tokens": 4}
        extra = {} if path.startswith("/api") else limit
        answer = gateway.client.post(path, json={"model": "tiny", **extra, **body})
        assert answer.status_code == 200, (path, answer.text)
        assert "image" in answer.headers["x-ignored-fields"], path


def test_half_of_a_surrogate_pair_in_a_history_is_replaced(gateway: GatewayProcess) -> None:
    """Written in the body, or in the JSON of a call's arguments inside it."""
    arguments = {"name": "look", "arguments": r'{"at": "\ud83d"}'}
    called = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": arguments}]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "cut \ud83d"}
    messages = [*user_message("x"), called, result]
    body = {"model": "tiny", "max_tokens": 4, "messages": messages}
    answer = gateway.client.post("/v1/chat/completions", content=json.dumps(body))
    assert answer.status_code == 200, answer.text
