"""`/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BeforeValidator

from gateway.context import GatewayDep
from gateway.fields import StreamOptions
from gateway.json_route import JsonRoute
from gateway.openai.answer import chat_answer, head_of
from gateway.openai.answering import events_of
from gateway.openai.chat_request import ChatCompletionRequest, options_of
from gateway.openapi import streamed
from gateway.refusals import validated
from gateway.responses.request import ResponsesRequest, chat_request
from gateway.responses.store import Store, items_of
from gateway.sse import respond

router = APIRouter(tags=["chat"], route_class=JsonRoute)
_ANSWER = streamed("OpenAI's `chat.completion`.", "`chat.completion.chunk`s, then `[DONE]`.")


def _in_chat_form(body: Any) -> Any:
    """Return a chat's body. Cursor sends the form of `/responses` here, which is converted."""
    if not isinstance(body, dict) or "messages" in body or "input" not in body:
        return body
    options = None
    if body.get("stream_options") == {"include_usage": True}:  # any other value is ignored
        body, options = {**body}, StreamOptions(include_usage=True)
        del body["stream_options"]
    asked = validated(ResponsesRequest, body)
    nothing = Store(0)  # so a reference to a stored response or item is refused
    if asked.previous_response_id:
        nothing.get(asked.previous_response_id, "previous_response_id")
    chat = chat_request(asked, items_of(nothing.resolved(asked.input))).chat
    return chat.model_copy(update={"stream": asked.stream, "stream_options": options})


Body = Annotated[
    ChatCompletionRequest,
    BeforeValidator(_in_chat_form, json_schema_input_type=ChatCompletionRequest),
]


@router.post("/chat/completions", responses=_ANSWER)
async def chat_completions(body: Body, gateway: GatewayDep) -> Response:
    """Return an answer to a conversation, in one piece or as a stream of server-sent events."""
    config = gateway.supervisor.resolve(body.model)
    wanted = await options_of(body, config, gateway)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    answer = chat_answer(head_of("chatcmpl", kind, body.model, config), body)
    events = events_of(body, wanted, gateway)
    return await respond(events, answer, gateway.settings, streams=body.stream is True)
