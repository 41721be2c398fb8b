"""`/completions`: the legacy endpoint, which goes on with a text as it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from gateway.context import Gateway, GatewayDep
from gateway.generation import Event, generate_all
from gateway.openai.completion_answer import completion, completion_chunks
from gateway.openai.completion_request import CompletionRequest
from gateway.openai.completion_to_wire import CompletionPlan, completion_plan
from gateway.openai.field_names import names_of
from gateway.openai.identity import identity
from gateway.openai.response_models import Completion, documented
from gateway.sse import event_stream
from gateway.supervisor.supervisor import Lease

router = APIRouter(tags=["completions"])


@router.post(
    "/completions",
    response_model=None,
    responses=documented(Completion, "`text_completion` objects, then `[DONE]`."),
)
async def completions(body: CompletionRequest, gateway: GatewayDep) -> Response:
    """What comes after a text, or after each of several, whole or as a stream."""
    if body.stream:
        return event_stream(_stream(body, gateway), gateway.settings)
    async with gateway.supervisor.lease(body.model, body.adapters, body.draft_model) as lease:
        plan = completion_plan(body, lease)
        async with aclosing(_events(body, plan, lease, gateway)) as events:
            head = identity("cmpl", body.model, lease.config)
            return JSONResponse(await completion(events, head, plan))


async def _stream(body: CompletionRequest, gateway: Gateway) -> AsyncGenerator[str, None]:
    async with gateway.supervisor.lease(body.model, body.adapters, body.draft_model) as lease:
        plan = completion_plan(body, lease)
        async with aclosing(_events(body, plan, lease, gateway)) as events:
            head = identity("cmpl", body.model, lease.config)
            async for chunk in completion_chunks(events, head, plan):
                yield chunk


def _events(
    body: CompletionRequest, plan: CompletionPlan, lease: Lease, gateway: Gateway
) -> AsyncGenerator[tuple[int, Event], None]:
    return generate_all(
        lease.stub, plan.wanted, seconds=gateway.settings.request_timeout, names=names_of(body)
    )
