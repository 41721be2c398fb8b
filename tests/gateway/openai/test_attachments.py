"""Files and sounds that programs attach, and results that do not name their call."""

from __future__ import annotations

import base64
import io
import json
import wave
from typing import Any

import pytest

from gateway.anthropic.request import MessagesRequest
from gateway.anthropic.request import chat_request as of_anthropic
from gateway.errors import ApiError
from gateway.ollama.request import ChatRequest
from gateway.ollama.request import chat_request as of_ollama
from gateway.openai.answering import Translation
from gateway.responses.request import ResponsesRequest
from gateway.responses.request import chat_request as of_responses
from tests.gateway.asking import user_message
from tests.gateway.openai.test_chat_to_wire import translated
from wire import backend_pb2 as pb

Json = dict[str, Any]
TEXT = "Ärger in line 1\nline 2"
CODED = base64.b64encode(TEXT.encode()).decode()
URI = f"data:text/markdown;base64,{CODED}"
ZIP = base64.b64encode(b"PK\x03\x04\xff").decode()
PDF = base64.b64encode(b"%PDF-1.7\n1 0 obj").decode()


def sound() -> str:
    """A WAV file in base64."""
    kept = io.BytesIO()
    with wave.open(kept, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(8000)
        written.writeframes(b"\0\0" * 80)
    return base64.b64encode(kept.getvalue()).decode()


def wire(translation: Translation) -> pb.PredictOptions:
    chat = translation.chat.model_dump(exclude_none=True, by_alias=True)
    return translated({"messages": chat["messages"]})[0]


def chat(*parts: Json) -> pb.PredictOptions:
    return translated({"messages": [{"role": "user", "content": [*parts]}]})[0]


def responses(*parts: Json) -> pb.PredictOptions:
    body = {"model": "m", "input": [{"role": "user", "content": [*parts]}]}
    request = ResponsesRequest.model_validate(body)
    return wire(of_responses(request, request.input))  # type: ignore[arg-type]


def anthropic(*parts: Json) -> pb.PredictOptions:
    messages = [{"role": "user", "content": [*parts]}]
    body = {"model": "m", "max_tokens": 1, "messages": messages}
    return wire(of_anthropic(MessagesRequest.model_validate(body)))


SOURCE = {"type": "base64", "media_type": "text/plain", "data": CODED}


@pytest.mark.parametrize(
    ("ask", "part", "read"),
    [
        (chat, {"type": "file", "file": {"filename": "a.md", "file_data": URI}}, f"a.md\n{TEXT}"),
        (chat, {"type": "file", "file": {"file_data": CODED}}, TEXT),
        (chat, {"type": "file", "base64": CODED, "mime_type": "text/csv"}, TEXT),
        (responses, {"type": "input_file", "filename": "b", "file_data": URI}, f"b\n{TEXT}"),
        (anthropic, {"type": "document", "source": SOURCE, "title": "T"}, f"T\n{TEXT}"),
        (anthropic, {"type": "document", "source": {"type": "text", "data": "plain"}}, "plain"),
    ],
)
def test_a_file_of_text_is_read(ask: Any, part: Json, read: str) -> None:
    assert ask(part).Messages[0].content == read


@pytest.mark.parametrize(
    ("ask", "part", "words"),
    [
        (chat, {"type": "file", "file": {"filename": "a", "file_data": ZIP}}, "send its text"),
        (chat, {"type": "file", "file": {"file_id": "f"}}, "send its text"),
        (responses, {"type": "input_file", "filename": "a", "file_data": ZIP}, "send its text"),
        (responses, {"type": "input_file", "file_url": "https://x.y/z"}, "send its text"),
        (chat, {"type": "unheard", "audio_url": "data:"}, "unheard is not served"),
        (anthropic, {"type": "unheard", "source": SOURCE | {"data": ZIP}}, "unheard is not served"),
    ],
)
def test_any_other_file_is_refused_with_what_to_send(ask: Any, part: Json, words: str) -> None:
    """If the model got only the name or title, nobody would notice that the content is missing."""
    with pytest.raises((ApiError, ValueError), match=words):
        ask(part)


def test_a_document_that_cannot_be_read_is_described_to_the_model() -> None:
    """Agents send the document again in every request, so a refusal would end the conversation."""
    pages = {"type": "document", "title": "T", "source": {"type": "base64", "data": PDF}}
    data = f"data:application/pdf;base64,{PDF}"
    for ask, part in (
        (anthropic, pages),
        (anthropic, {"type": "tool_result", "tool_use_id": "1", "content": [pages]}),
        (chat, {"type": "file", "file": {"filename": "a.pdf", "file_data": data}}),
        (chat, {"type": "file", "base64": PDF, "mime_type": "application/pdf"}),
        (responses, {"type": "input_file", "filename": "a", "file_data": PDF}),
    ):
        request = ask(part)
        assert request.Messages[-1].content.startswith("[A document, such as a PDF, could not")


@pytest.mark.parametrize(
    ("ask", "part"),
    [
        (chat, lambda data: {"type": "audio_url", "audio_url": {"url": data}}),
        (chat, lambda data: {"type": "audio_url", "audio_url": data}),
        (
            responses,
            lambda data: {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        ),
    ],
)
def test_a_sound_reaches_the_backend(ask: Any, part: Any) -> None:
    (found,) = ask(part(f"data:audio/wav;base64,{sound()}")).Audios
    assert found.startswith("data:audio/wav;base64,")


def test_a_sound_is_not_fetched() -> None:
    with pytest.raises(ApiError) as refusal:
        chat({"type": "audio_url", "audio_url": {"url": "https://x.y/z.wav"}})
    assert refusal.value.param == "messages[0].content[0].audio_url"


def called(*names: str) -> Json:
    calls = [{"function": {"name": name, "arguments": {}}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize(
    ("results", "answered"),
    [
        ([{}, {}], [0, 1]),
        ([{"tool_name": "b"}, {"tool_name": "a"}], [1, 0]),
        ([{"tool_name": "b"}, {}], [1, 0]),
        ([{"tool_name": "other"}, {}, {}], [None, 0, 1]),
    ],
)
def test_results_without_an_id_answer_the_calls_in_order(
    results: list[Json], answered: list[int | None]
) -> None:
    """Home Assistant's results have neither an id nor a name, Zed's only a name."""
    turns = [{"role": "tool", "content": "1", **result} for result in results]
    earlier = [called("a", "a"), *({"role": "tool", "content": "0"} for _ in "ab")]
    body = {"model": "m", "messages": [*user_message("x"), *earlier, called("a", "b"), *turns]}
    translation = of_ollama(ChatRequest.model_validate(body))
    assert translation is not None
    messages = wire(translation).Messages
    calls = json.loads(messages[4].tool_calls)
    ids = [call["id"] for call in calls]
    assert len({*ids, *(call["id"] for call in json.loads(messages[1].tool_calls))}) == 4
    found = [message.tool_call_id for message in messages[5:]]
    assert found == [ids[at] if at is not None else "" for at in answered]
    names = [message.name for message in messages[5:]]
    assert names == [
        calls[at]["function"]["name"] if at is not None else "other" for at in answered
    ]
