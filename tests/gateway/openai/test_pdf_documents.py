"""PDFs in the messages of all three APIs: the model gets their text."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gateway.openai.messages import UNREAD
from tests.common.pdf_files import WITHOUT_TEXT, in_base64, of_pages, slow
from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.test_tolerance import CHAT, MESSAGES, RESPONSES

Json = dict[str, Any]
NAME = "a.pdf"


def message(path: str, part: Json) -> Json:
    """A user's message with a file, and a question."""
    kind = "input_text" if path == RESPONSES else "text"
    return {"role": "user", "content": [part, {"type": kind, "text": "What does it say?"}]}


def body(path: str, *messages: Json) -> Json:
    if path == RESPONSES:
        return {"model": "tiny", "input": [*messages], "max_output_tokens": 1}
    return {"model": "tiny", "messages": [*messages], "max_tokens": 1}


def file(path: str, content: bytes, name: str = NAME) -> Json:
    data = in_base64(content)
    if path == MESSAGES:
        source = {"type": "base64", "media_type": "application/pdf", "data": data}
        return {"type": "document", "source": source, "title": name}
    if path == RESPONSES:
        uri = f"data:application/pdf;base64,{data}"
        return {"type": "input_file", "filename": name, "file_data": uri}
    return {"type": "file", "file": {"filename": name, "file_data": data}}


def answered(gateway: GatewayProcess, path: str, *messages: Json) -> tuple[int, str]:
    """The tokens of the prompt, and the ignored fields."""
    answer = gateway.client.post(path, json=body(path, *messages))
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    tokens = usage.get("prompt_tokens") or usage["input_tokens"]
    tokens += usage.get("cache_read_input_tokens", 0)
    return tokens, answer.headers.get("x-ignored-fields", "")


def asked(gateway: GatewayProcess, path: str, part: Json) -> tuple[int, str]:
    return answered(gateway, path, message(path, part))


def text(path: str, words: str) -> Json:
    return {"type": "input_text" if path == RESPONSES else "text", "text": words}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_pdf_is_read_as_text_after_its_name(gateway: GatewayProcess, path: str) -> None:
    read = asked(gateway, path, file(path, of_pages("Seven plus five", "is twelve.")))
    assert read == asked(gateway, path, text(path, f"{NAME}\nSeven plus five\n\nis twelve."))
    assert read != asked(gateway, path, text(path, NAME))


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("written", WITHOUT_TEXT)
def test_the_model_is_told_of_a_pdf_without_text(
    gateway: GatewayProcess, path: str, written: Callable[[], bytes]
) -> None:
    tokens, ignored = asked(gateway, path, file(path, written()))
    assert tokens == asked(gateway, path, text(path, UNREAD))[0]
    names = {CHAT: "messages[].content[][file]", MESSAGES: "messages[].content[][document]"}
    assert ignored == names.get(path, "input[].content[][input_file]")


def test_other_requests_continue_while_a_pdf_is_read(gateway: GatewayProcess) -> None:
    """Its first page is shown when the time is over."""
    with ThreadPoolExecutor(1) as client:
        slowly = client.submit(asked, gateway, CHAT, file(CHAT, slow("Twelve.")))
        for _ in range(20):
            assert gateway.client.get("/health").status_code == 200
        assert not slowly.done()
        cut = "Twelve.\n\n[The rest of this document could not be shown.]"
        assert slowly.result() == asked(gateway, CHAT, text(CHAT, f"{NAME}\n{cut}"))


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_pdf_in_the_result_of_a_call_is_read(gateway: GatewayProcess, path: str) -> None:
    def prompt(part: Json) -> int:
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [part]}
        use = {"type": "tool_use", "id": "t1", "name": "read", "input": {}}
        turns: list[Json] = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        return answered(gateway, path, *turns)[0]

    assert prompt(file(path, of_pages("Twelve."))) == prompt(text(path, f"{NAME}\nTwelve."))


def test_a_stored_conversation_keeps_its_pdf(gateway: GatewayProcess) -> None:
    sent = file(RESPONSES, of_pages("Twelve."))
    first = gateway.client.post(RESPONSES, json=body(RESPONSES, message(RESPONSES, sent))).json()
    items = gateway.client.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
    assert items[0]["content"][0] == sent
    again = {"model": "tiny", "input": "And?", "previous_response_id": first["id"]}
    second = gateway.client.post(RESPONSES, json={**again, "max_output_tokens": 1})
    assert second.status_code == 200, second.text
    assert second.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]
