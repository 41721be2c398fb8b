"""`/completions`: the legacy endpoint, which continues a text as it is."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from gateway.context import GatewayDep
from gateway.limits import JsonRoute
from gateway.openai.answering import events_of
from gateway.openai.completion_answer import CompletionStream, completion
from gateway.openai.completion_request import CompletionRequest
from gateway.openai.completion_to_wire import completion_plan
from gateway.openai.envelope import head_of
from gateway.openai.response_models import COMPLETION
from gateway.openapi import documented
from gateway.sse import EventStream

router = APIRouter(tags=["completions"], route_class=JsonRoute)


@router.post(
    "/completions",
    responses=documented("Completion", COMPLETION, "`text_completion` objects, then `[DONE]`."),
)
async def completions(body: CompletionRequest, gateway: GatewayDep) -> Response:
    """The continuation of a text, or of each of several, in one piece or as a stream."""
    config = gateway.supervisor.resolve(body.model)
    plan = completion_plan(body, config)
    head = head_of("cmpl", "text_completion", body.model, config)
    events = events_of(body, plan.wanted, gateway)
    if body.stream:
        stream = CompletionStream(head, plan)
        return EventStream(stream.chunks(events), str, gateway.settings, stream.beat)
    async with aclosing(events):
        return JSONResponse(await completion(events, head, plan))
