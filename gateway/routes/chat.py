"""`/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from gateway.context import Gateway, GatewayDep
from gateway.generation import Event, generate_all
from gateway.openai.chat_answer import chat_completion
from gateway.openai.chat_form import form_of
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.chat_stream import chat_chunks
from gateway.openai.chat_to_wire import predict_options
from gateway.openai.field_names import names_of
from gateway.openai.identity import identity
from gateway.openai.response_models import ChatCompletion, documented
from gateway.sse import event_stream
from gateway.supervisor.supervisor import Lease

router = APIRouter(tags=["chat"])


@router.post(
    "/chat/completions",
    response_model=None,
    responses=documented(ChatCompletion, "`chat.completion.chunk` objects, then `[DONE]`."),
)
async def chat_completions(body: ChatCompletionRequest, gateway: GatewayDep) -> Response:
    """An answer to a conversation, whole or as a stream of server-sent events."""
    if body.stream:
        return event_stream(_stream(body, gateway), gateway.settings)
    async with gateway.supervisor.lease(body.model, body.adapters, body.draft_model) as lease:
        events = await _events(body, lease, gateway)
        async with aclosing(events):
            head = identity("chatcmpl", body.model, lease.config)
            return JSONResponse(await chat_completion(events, head, form_of(body)))


async def _stream(body: ChatCompletionRequest, gateway: Gateway) -> AsyncGenerator[str, None]:
    async with gateway.supervisor.lease(body.model, body.adapters, body.draft_model) as lease:
        events = await _events(body, lease, gateway)
        async with aclosing(events):
            head = identity("chatcmpl", body.model, lease.config)
            async for chunk in chat_chunks(events, head, form_of(body)):
                yield chunk


async def _events(
    body: ChatCompletionRequest, lease: Lease, gateway: Gateway
) -> AsyncGenerator[tuple[int, Event], None]:
    wanted = await predict_options(body, lease, gateway)
    return generate_all(
        lease.stub, wanted, seconds=gateway.settings.request_timeout, names=names_of(body)
    )
