"""`/chat/completions`."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from gateway.context import GatewayDep
from gateway.limits import JsonRoute
from gateway.openai.answering import events_of
from gateway.openai.chat_answer import chat_completion, form_of
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.chat_stream import ChatStream
from gateway.openai.chat_to_wire import options_of
from gateway.openai.envelope import head_of
from gateway.openai.response_models import CHAT_COMPLETION
from gateway.openapi import documented
from gateway.sse import EventStream

router = APIRouter(tags=["chat"], route_class=JsonRoute)


@router.post(
    "/chat/completions",
    responses=documented(
        "ChatCompletion", CHAT_COMPLETION, "`chat.completion.chunk` objects, then `[DONE]`."
    ),
)
async def chat_completions(body: ChatCompletionRequest, gateway: GatewayDep) -> Response:
    """An answer to a conversation, in one piece or as a stream of server-sent events."""
    config = gateway.supervisor.resolve(body.model)
    wanted = await options_of(body, config, gateway)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head, form = head_of("chatcmpl", kind, body.model, config), form_of(body)
    events = events_of(body, wanted, gateway)
    if body.stream:
        stream = ChatStream(head, form)
        return EventStream(stream.chunks(events), str, gateway.settings, stream.beat)
    async with aclosing(events):
        return JSONResponse(await chat_completion(events, head, form))
