"""`/messages` and `/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from gateway.anthropic.answer import ERRORS, MessageAnswer
from gateway.anthropic.request import CountTokensRequest, MessagesRequest, chat_request
from gateway.context import GatewayDep
from gateway.json_route import JsonRoute
from gateway.openai.answering import answer, count_prompt, question_of
from gateway.openapi import streamed
from gateway.refusals import FORMS
from gateway.sse import respond
from gateway.threads import offload

router = APIRouter(tags=["anthropic"], route_class=JsonRoute)
FORMS["messages"] = ERRORS
_ANSWER = streamed("Anthropic's message.", "Anthropic's events.")


@router.post("/messages", responses=_ANSWER)
async def create_message(body: MessagesRequest, gateway: GatewayDep) -> Response:
    """Return the next message of a conversation, in one piece or as server-sent events."""
    question = await question_of(
        await offload(chat_request, body), gateway, prompt_only=body.max_tokens == 0
    )
    reply = MessageAnswer(body, question.model)
    events = answer(question, gateway)
    return await respond(events, reply, gateway.settings, streams=body.stream is True)


@router.post("/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, gateway: GatewayDep) -> Response:
    """Return how many tokens the prompt has, as the model's chat template renders it."""
    return JSONResponse(
        {"input_tokens": await count_prompt(await offload(chat_request, body), gateway)}
    )
