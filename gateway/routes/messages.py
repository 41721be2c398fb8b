"""`/messages` and `/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from gateway import sse
from gateway.anthropic import errors
from gateway.anthropic.answer import MessageAnswer
from gateway.anthropic.request import CountTokensRequest, MessagesRequest
from gateway.anthropic.to_chat import chat_request
from gateway.context import GatewayDep
from gateway.limits import JsonRoute, apart
from gateway.openai.answering import answer, count_prompt, question_of
from gateway.openapi import documented
from gateway.refusals import FORMS, INTEGER, TEXT, TEXT_OR_NULL, list_of, one_of, schema_of

router = APIRouter(tags=["anthropic"], route_class=JsonRoute)
FORMS["messages"] = errors.ERRORS
_COUNT = schema_of(input_tokens=INTEGER)
_NULL = {"type": "null"}
_USAGE = schema_of(
    input_tokens=INTEGER | {"description": "Prompt tokens that the next two fields do not count."},
    cache_creation_input_tokens=INTEGER,
    cache_read_input_tokens=INTEGER,
    output_tokens=INTEGER,
    **{name: {"type": "object"} for name in ("output_tokens_details", "cache_creation")},
    **dict.fromkeys(("server_tool_use", "inference_geo"), _NULL),
    service_tier=one_of("standard"),
)
# Other fields of a block depend on its type.
_BLOCK = schema_of(type=one_of("text", "thinking", "tool_use")) | {"additionalProperties": True}
_MESSAGE = schema_of(
    **dict.fromkeys(("id", "model"), TEXT),
    type=one_of("message"),
    role=one_of("assistant"),
    content=list_of(_BLOCK),
    stop_reason=one_of(
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ),
    stop_sequence=TEXT_OR_NULL,
    **dict.fromkeys(("stop_details", "container"), _NULL),
    usage=_USAGE,
)


@router.post("/messages", responses=documented("AnthropicMessage", _MESSAGE, "Anthropic's events."))
async def create_message(body: MessagesRequest, gateway: GatewayDep) -> Response:
    """The next message of a conversation, in one piece or as a stream of server-sent events."""
    question = await question_of(
        await apart(chat_request, body), gateway, prompt_only=body.max_tokens == 0
    )
    reply = MessageAnswer(body, question.model)
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


@router.post("/messages/count_tokens", responses=documented("TokenCount", _COUNT))
async def count_tokens(body: CountTokensRequest, gateway: GatewayDep) -> Response:
    """How many tokens the prompt has, as the model's chat template renders it."""
    return JSONResponse(
        {"input_tokens": await count_prompt(await apart(chat_request, body), gateway)}
    )
