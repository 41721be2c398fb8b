"""`/messages` and `/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

from contextlib import aclosing
from typing import Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from gateway import sse
from gateway.anthropic import errors
from gateway.anthropic.answer import Answer
from gateway.anthropic.request import CountTokensRequest, MessagesRequest
from gateway.anthropic.to_chat import chat_request
from gateway.context import GatewayDep
from gateway.limits import JsonRoute
from gateway.openai.answering import answer, count_prompt, question_of
from gateway.openapi import documented
from gateway.refusals import FORMS

router = APIRouter(tags=["anthropic"], route_class=JsonRoute)
FORMS["messages"] = errors.ERRORS


class ContentBlock(BaseModel):
    """A block of the answer; its other fields depend on its type."""

    type: Literal["text", "thinking", "tool_use"]


class Usage(BaseModel):
    """Tokens of the request; the first three fields together count the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]
    cache_creation: dict[str, int]
    server_tool_use: None
    service_tier: Literal["standard"]
    inference_geo: None


class AnthropicMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: Usage


class TokenCount(BaseModel):
    """Tokens of the rendered prompt."""

    input_tokens: int


@router.post("/messages", responses=documented(AnthropicMessage, "Anthropic's events."))
async def create_message(body: MessagesRequest, gateway: GatewayDep) -> Response:
    """The next message of a conversation, in one piece or as a stream of server-sent events."""
    question = await question_of(chat_request(body), gateway, prompt_only=body.max_tokens == 0)
    reply = Answer(body, question.model)
    events = answer(question, gateway)
    if body.stream:
        return sse.EventStream(
            events,
            lambda event: sse.written(reply.take(event)),
            gateway.settings,
            lambda: sse.written(reply.beat()),
            errors.event,
        )
    async with aclosing(events):
        async for event in events:
            reply.take(event)
    return JSONResponse(reply.message())


@router.post("/messages/count_tokens", responses=documented(TokenCount))
async def count_tokens(body: CountTokensRequest, gateway: GatewayDep) -> Response:
    """How many tokens the prompt has, as the model's chat template renders it."""
    return JSONResponse({"input_tokens": await count_prompt(chat_request(body), gateway)})
