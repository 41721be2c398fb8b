"""`/completions`: the legacy endpoint, which goes on with a text as it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from gateway.context import GatewayDep
from gateway.generation import Event
from gateway.openai.completion_answer import completion, completion_chunks
from gateway.openai.completion_request import CompletionRequest
from gateway.openai.completion_to_wire import CompletionPlan, completion_plan
from gateway.openai.identity import Identity, identity
from gateway.openai.response_models import Completion, documented
from gateway.openai.running import events_of
from gateway.sse import event_stream

router = APIRouter(tags=["completions"])


@router.post(
    "/completions",
    response_model=None,
    responses=documented(Completion, "`text_completion` objects, then `[DONE]`."),
)
async def completions(body: CompletionRequest, gateway: GatewayDep) -> Response:
    """What comes after a text, or after each of several, whole or as a stream."""
    config = gateway.supervisor.resolve(body.model)
    plan = completion_plan(body, config)
    head = identity("cmpl", body.model or config.name, config)
    events = events_of(body, plan.wanted, gateway)
    if body.stream:
        return event_stream(_stream(events, head, plan), gateway.settings)
    async with aclosing(events):
        return JSONResponse(await completion(events, head, plan))


async def _stream(
    events: AsyncGenerator[tuple[int, Event], None], head: Identity, plan: CompletionPlan
) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        async for chunk in completion_chunks(events, head, plan):
            yield chunk
