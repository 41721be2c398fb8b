"""Pictures over HTTP: a picture in a message reaches the model."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from tests.engine.media.clips import BLUE, RED, in_base64, plain, saved
from tests.gateway.gateway_process import ROOT, GatewayProcess

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 220), "black": (0, 0, 0)}


@pytest.fixture(scope="module")
def seeing() -> Iterator[GatewayProcess]:
    model = {"parameters": {"model": str(ROOT / "tests" / "models" / "tiny_vision")}}
    process = GatewayProcess({"eye": model | {"context_size": 1024}})
    yield process
    process.close()


def picture(colour: str, form: str = "PNG") -> str:
    file = io.BytesIO()
    Image.new("RGB", (48, 48), COLOURS[colour]).save(file, form)
    return base64.b64encode(file.getvalue()).decode()


def chat(gateway: GatewayProcess, *parts: dict[str, Any]) -> Any:
    body = {
        "model": "eye",
        "temperature": 0,
        "max_tokens": 40,
        "messages": [{"role": "user", "content": list(parts)}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    return gateway.client.post("/v1/chat/completions", json=body)


def image(colour: str, form: str = "PNG") -> dict[str, Any]:
    url = f"data:image/{form.lower()};base64,{picture(colour, form)}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_lists_of_models_say_what_it_takes(seeing: GatewayProcess) -> None:
    """Programs offer pictures only to models that are listed so."""
    shown = seeing.client.post("/api/show", json={"model": "eye"}).json()
    assert shown["capabilities"] == ["completion", "tools", "vision", "thinking"]
    (card,) = seeing.client.get("/v1/models").json()["data"]
    assert card["meta"]["abilities"] == shown["capabilities"]
    can = {name for name, support in card["capabilities"].items() if support["supported"]}
    assert can == {"image_input", "thinking", "effort", "structured_outputs"}
    assert card["architecture"]["input_modalities"] == ["text", "image", "video"]


@pytest.mark.parametrize("colour", COLOURS)
def test_the_colour_is_named(seeing: GatewayProcess, colour: str) -> None:
    answer = chat(seeing, image(colour), text("What colour is the image?"))
    assert answer.status_code == 200, answer.text
    assert colour in answer.json()["choices"][0]["message"]["content"]


def test_two_colours_are_named_in_order(seeing: GatewayProcess) -> None:
    answer = chat(seeing, image("red"), image("blue", "JPEG"), text("What colours are the images?"))
    answered = answer.json()["choices"][0]["message"]["content"]
    assert answered.index("red") < answered.index("blue")


def test_an_image_stays_in_its_message(seeing: GatewayProcess) -> None:
    """Therefore the second prompt begins like the first one, and the prompt cache serves it."""
    asked = {"role": "user", "content": [image("blue"), text("What colour is the image?")]}
    body = {
        "model": "eye",
        "temperature": 0,
        "max_tokens": 40,
        "chat_template_kwargs": {"enable_thinking": False},
        "messages": [asked],
    }
    first = seeing.client.post("/v1/chat/completions", json=body).json()
    answered = first["choices"][0]["message"]["content"]
    turn = {"role": "user", "content": [image("red"), text("What colour is the image?")]}
    body["messages"] = [asked, {"role": "assistant", "content": answered}, turn]
    second = seeing.client.post("/v1/chat/completions", json=body).json()
    assert "blue" in answered
    assert "red" in second["choices"][0]["message"]["content"]
    assert "blue" not in second["choices"][0]["message"]["content"]
    known = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    # The template ends a prompt with empty reasoning, which it omits from earlier turns.
    assert known >= first["usage"]["prompt_tokens"] - 6


def test_images_work_with_every_api(seeing: GatewayProcess) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": picture("green")}
    parts = [{"type": "image", "source": source}, text("What colour is the image?")]
    body = {
        "model": "eye",
        "max_tokens": 40,
        "temperature": 0,
        "thinking": {"type": "disabled"},
        "messages": [{"role": "user", "content": parts}],
    }
    answer = seeing.client.post("/v1/messages", json=body)
    assert "green" in answer.json()["content"][0]["text"], answer.text
    content = [
        {"type": "input_image", "image_url": image("green")["image_url"]["url"]},
        {"type": "input_text", "text": "What colour is the image?"},
    ]
    body = {
        "model": "eye",
        "temperature": 0,
        "reasoning": {"effort": "none"},
        "input": [{"role": "user", "content": content}],
    }
    answer = seeing.client.post("/v1/responses", json=body)
    assert "green" in answer.json()["output"][0]["content"][0]["text"], answer.text


def test_a_video_works_with_every_api(seeing: GatewayProcess) -> None:
    red, blue = (in_base64(saved(plain([colour] * 8))) for colour in (RED, BLUE))
    question = "What colour is the image?"
    uri = f"data:video/mp4;base64,{red}"
    for part in (
        {"type": "video_url", "video_url": {"url": uri}},
        {"type": "video_url", "video_url": red},
        {"type": "input_video", "video_url": {"url": uri}},
    ):
        answer = chat(seeing, part, text(question))
        assert answer.status_code == 200, answer.text
        assert "red" in answer.json()["choices"][0]["message"]["content"]
        assert answer.json()["usage"]["prompt_tokens"] > 60
    given = {"model": "eye", "temperature": 0}
    content = [
        {"type": "input_video", "video_url": f"data:video/mp4;base64,{blue}"},
        {"type": "input_text", "text": question},
    ]
    body = given | {
        "reasoning": {"effort": "none"},
        "input": [{"role": "user", "content": content}],
    }
    answer = seeing.client.post("/v1/responses", json=body)
    assert "blue" in answer.json()["output"][0]["content"][0]["text"], answer.text
    source = {"type": "base64", "media_type": "video/mp4", "data": red}
    parts = [{"type": "video", "source": source}, text(question)]
    messages = [{"role": "user", "content": parts}]
    body = given | {"max_tokens": 40, "thinking": {"type": "disabled"}, "messages": messages}
    answer = seeing.client.post("/v1/messages", json=body)
    assert "red" in answer.json()["content"][0]["text"], answer.text
    messages = [{"role": "user", "content": question, "images": [blue]}]
    body = {"model": "eye", "stream": False, "think": False, "messages": messages}
    answer = seeing.client.post("/api/chat", json=body | {"options": {"temperature": 0}})
    assert "blue" in answer.json()["message"]["content"], answer.text


def test_an_invalid_video_is_refused_with_its_path(seeing: GatewayProcess) -> None:
    cut = in_base64(saved(plain([RED] * 8))[:-200])
    for url, code in ((f"data:video/mp4;base64,{cut}", None), ("data:,x", "invalid_image")):
        part = {"type": "input_video", "video_url": {"url": url}}
        answer = chat(seeing, image("red"), text("What colour is the image?"), part)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "messages[0].content[2].video_url"
        assert code is None or error["code"] == code
    closed = {"type": "video_url", "video_url": {"url": "https://example.org/clip.mp4"}}
    answer = chat(seeing, closed)
    assert "videos are not fetched from URLs here" in answer.json()["error"]["message"]


def test_an_invalid_image_is_refused_with_its_path(seeing: GatewayProcess) -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    answer = chat(seeing, text("What colour is the image?"), broken)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[1].image_url"
