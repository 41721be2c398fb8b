"""`/responses`: OpenAI's Responses, and those that are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse

from common.field_names import named
from gateway import exchange
from gateway.calls import Usage
from gateway.context import GatewayDep
from gateway.errors import bad_field
from gateway.json_route import JsonRoute
from gateway.openai.answering import Translation, answer, count_prompt, question_of, whole_answer
from gateway.openapi import streamed
from gateway.responses import compaction
from gateway.responses.answer import ResponseAnswer
from gateway.responses.items import ITEMS, Item, Offered
from gateway.responses.request import PromptRequest, ResponsesRequest, chat_request, tools_of
from gateway.responses.store import Store, Stored, as_stored, items_of
from gateway.sse import respond
from gateway.threads import offload

router = APIRouter(tags=["responses"], route_class=JsonRoute)
Json = dict[str, Any]
_ANSWER = streamed("OpenAI's `response`.", "OpenAI's events.")


async def _store(request: Request, gateway: GatewayDep) -> Store:
    state = request.app.state
    if not hasattr(state, "responses"):
        state.responses = Store(gateway.settings.keep_responses)
    found = state.responses
    assert isinstance(found, Store)
    found.forget_old()
    return found


StoreDep = Annotated[Store, Depends(_store)]


@router.post("/responses", responses=_ANSWER)
async def create_response(body: ResponsesRequest, gateway: GatewayDep, store: StoreDep) -> Response:
    """Return an answer as a list of items, in one piece or as a stream of server-sent events."""
    if not gateway.settings.keep_responses:
        body = body.model_copy(update={"store": False})
    previous, given = await _input(body, store)
    translation, tools = await offload(_translated, body, given, previous)
    stored = await offload(as_stored, given, previous)
    question = await question_of(translation, gateway)

    def ended(response: Json) -> None:
        if body.store is not False:
            store.put(replace(stored, response=response))
            store.expire_later()

    reply = ResponseAnswer(body, question.model, question.config.parameters, tools, ended)
    events = answer(question, gateway)
    return await respond(events, reply, gateway.settings, streams=body.stream is True)


@router.post("/responses/input_tokens")
async def count_input_tokens(
    body: PromptRequest, gateway: GatewayDep, store: StoreDep
) -> JSONResponse:
    """Return how many tokens the prompt has, as the model's chat template renders it."""
    previous, given = await _input(body, store)
    translation, _ = await offload(_translated, body, given, previous)
    counted = await count_prompt(translation, gateway)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": counted})


@router.post("/responses/compact")
async def compact(body: PromptRequest, gateway: GatewayDep, store: StoreDep) -> JSONResponse:
    """Return the model's summary of a conversation, as an item that replaces the conversation."""
    previous, given = await _input(body, store)
    items = [*await offload(_earlier, previous), *given]
    bare = body.model_copy(update=compaction.WITHOUT)

    async def translated(part: Sequence[Item]) -> Translation:
        return (await offload(_translated, bare, [*part, compaction.REQUEST], None))[0]

    async def count(part: Sequence[Item]) -> int:
        return await count_prompt(await translated(part), gateway)

    async def summarise(part: Sequence[Item]) -> tuple[str, Usage]:
        return await whole_answer(await question_of(await translated(part), gateway), gateway)

    config = gateway.supervisor.resolve(body.model)
    limit = compaction.prompt_limit(gateway.supervisor.context_size(config))
    return JSONResponse(await compaction.compact(items, limit, count, summarise))


@router.get("/responses/{response_id}")
async def get_response(
    response_id: str,
    store: StoreDep,
    stream: Annotated[bool, Query(description="Only false: streams are not replayed.")] = False,
) -> JSONResponse:
    """Return a stored response."""
    if stream:
        raise bad_field(f"{named('stream')} is true: streams are not replayed; send false")
    return JSONResponse(store.get(response_id, "response_id").response)


@router.delete("/responses/{response_id}")
async def delete_response(response_id: str, store: StoreDep) -> JSONResponse:
    """Delete a stored response; responses that continued it stay."""
    store.delete(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    store: StoreDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(description="The id after which the page begins.")] = None,
) -> JSONResponse:
    """Return the input items of a stored response, including those of earlier responses."""
    stored = store.get(response_id, "response_id")
    items = [*stored.earlier, *stored.given]
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [at for at, item in enumerate(items) if item["id"] == after]
        if not places:
            raise bad_field(f"{named('after')} does not name an item of this response")
        items = items[places[0] + 1 :]
    page = items[:limit]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


async def _input(body: PromptRequest, store: Store) -> tuple[Stored | None, list[Item]]:
    """Return the response that a request continues, and the items of its input."""
    previous = None
    if body.previous_response_id:
        exchange.current().long = True  # a short body may continue a long conversation
        previous = store.get(body.previous_response_id, "previous_response_id")
    return previous, await offload(items_of, store.resolved(body.input, previous))


def _earlier(previous: Stored | None) -> list[Item]:
    return ITEMS.validate_python(list(previous.conversation())) if previous else []


def _translated(
    body: PromptRequest, given: Sequence[Item], previous: Stored | None
) -> tuple[Translation, list[Offered]]:
    earlier = _earlier(previous)
    return chat_request(body, given, earlier), tools_of(body, given, earlier)
