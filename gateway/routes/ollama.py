"""Ollama's API under `/api`: chat, generate, embed, embeddings, tags, ps, show, version."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from gateway import sse
from gateway.context import Gateway, GatewayDep
from gateway.generation import Event
from gateway.limits import JsonRoute, apart
from gateway.models.config import ModelConfig
from gateway.ollama.answer import ERRORS, Answer, Json, chat_part, error_line, text_part, written
from gateway.ollama.request import ChatRequest, GenerateRequest, ModelName, chat_request
from gateway.openai.answering import answer, events_of, question_of
from gateway.openai.base import Request
from gateway.openai.completion_request import CompletionRequest
from gateway.openai.completion_to_wire import completion_plan
from gateway.refusals import FORMS
from gateway.routes.embeddings import EmbeddingRequest, Input, in_parts, vectors_of
from gateway.supervisor.status import State

VERSION = "0.12.11"  # whose API this follows
router = APIRouter(tags=["ollama"], route_class=JsonRoute)
FORMS["api"] = ERRORS

# Lines of JSON, or with `stream: false` one object: clients distinguish them by the content type.
_CONTENT = {"application/x-ndjson": "string", "application/json": "object"}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {kind: {"schema": {"type": of}} for kind, of in _CONTENT.items()}}
}


class ShowRequest(Request):
    """A model, by its newer or its older name."""

    model: ModelName | None = None
    name: ModelName | None = None


class EmbeddingsRequest(Request):
    model: ModelName = Field(min_length=1)
    prompt: str = Field(min_length=1)


class EmbedRequest(Request):
    model: ModelName = Field(min_length=1)
    input: Input
    dimensions: int | None = Field(default=None, ge=1)
    truncate: bool | None = None


@router.post("/api/chat", responses=_ANSWERS)
async def chat(body: ChatRequest, gateway: GatewayDep) -> Response:
    """The next turn of a conversation."""
    return await _answered(body, gateway, chat_part)


@router.post("/api/generate", responses=_ANSWERS)
async def generate(body: GenerateRequest, gateway: GatewayDep) -> Response:
    """The answer to one prompt."""
    return await _answered(body, gateway, text_part)


@router.post("/api/embed")
async def embed(body: EmbedRequest, gateway: GatewayDep) -> Response:
    """The vectors of texts."""
    asked = await apart(lambda: EmbeddingRequest.model_validate(body.model_dump()))
    vectors, tokens = await vectors_of(asked, gateway)
    others = {"model": body.model, "prompt_eval_count": tokens}
    return in_parts("embeddings", map(list, vectors), others)


@router.post("/api/embeddings")
async def embeddings(body: EmbeddingsRequest, gateway: GatewayDep) -> dict[str, Any]:
    """The vector of one text, as older programs ask for it."""
    asked = {"model": body.model, "input": body.prompt}
    vectors, _ = await vectors_of(EmbeddingRequest.model_validate(asked), gateway)
    return {"embedding": list(next(vectors))}


@router.get("/api/tags")
async def tags(gateway: GatewayDep) -> dict[str, Any]:
    """Every model of the folder."""
    return {"models": [_tag(gateway, model) for model in gateway.supervisor.models]}


@router.get("/api/ps")
async def running(gateway: GatewayDep) -> dict[str, Any]:
    """The loaded models, and the memory that each takes."""
    configs = {model.name: model for model in gateway.supervisor.models}
    return {
        "models": [
            _tag(gateway, configs[now.name])
            | {"size": now.memory_bytes, "size_vram": now.memory_bytes}
            for now in gateway.supervisor.status()
            if now.state is State.READY and now.name in configs
        ]
    }


@router.post("/api/show")
async def show(body: ShowRequest, gateway: GatewayDep) -> dict[str, Any]:
    """What is known of a model without loading it."""
    model = gateway.supervisor.resolve(body.model or body.name)
    limit = gateway.supervisor.checkpoints.context_size(model)
    known = {"mlx.context_length": limit} if limit else {}
    able = gateway.supervisor.checkpoints.abilities(model)
    return {
        "modelfile": "",
        "parameters": f"num_ctx {limit}" if limit else "",
        "template": "{{ .Prompt }}{{ .Suffix }}" if "insert" in able else "",
        "details": _tag(gateway, model)["details"],
        "model_info": {"general.architecture": "mlx", "general.basename": model.name, **known},
        "capabilities": able,
    }


@router.post("/api/pull", responses=_ANSWERS)
async def pull(body: ShowRequest, gateway: GatewayDep) -> Response:
    """Nothing, for a model of the folder: it is downloaded when it is first used."""
    gateway.supervisor.resolve(body.model or body.name)
    return Response('{"status":"success"}\n', media_type="application/x-ndjson")


@router.get("/api/version")
async def version() -> dict[str, str]:
    """The version of Ollama whose API this follows."""
    return {"version": VERSION}


def _tag(gateway: Gateway, model: ModelConfig) -> Json:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": f"{datetime.fromtimestamp(gateway.started, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "size": gateway.supervisor.checkpoints.weight_bytes(model),
        "digest": hashlib.sha256(model.model_dump_json().encode()).hexdigest(),
        "details": {
            **dict.fromkeys(("parent_model", "parameter_size", "quantization_level"), ""),
            **dict.fromkeys(("format", "family"), "mlx"),
            "families": ["mlx"],
        },
    }


async def _answered(
    body: ChatRequest | GenerateRequest,
    gateway: Gateway,
    part: Callable[[str, str, list[Json]], Json],
) -> Response:
    streams = body.stream is not False
    reply = Answer(body.model, part, streams=streams)
    if (translation := await apart(chat_request, body)) is None:
        if body.keep_alive in (0, "0", "0s", "0m"):
            await gateway.supervisor.unload(body.model)
            return JSONResponse(reply.empty("unload"))
        await gateway.supervisor.load(body.model)
        return JSONResponse(reply.empty("load"))
    if isinstance(body, GenerateRequest) and (body.raw or body.suffix):
        events = _raw(body, gateway)
    else:
        events = answer(await question_of(translation, gateway), gateway)
    if streams:
        return sse.EventStream(
            events,
            lambda event: "".join(map(written, reply.take(event))),
            gateway.settings,
            lambda: written(reply.beat()),
            error_line,
            "application/x-ndjson",
        )
    async with aclosing(events):
        *_, last = [line async for event in events for line in reply.take(event)]
    return JSONResponse(last)


async def _raw(body: GenerateRequest, gateway: Gateway) -> AsyncGenerator[Event, None]:
    given = body.options.model_dump(exclude_none=True) if body.options else {}
    given |= body.model_dump(include={"model", "prompt", "suffix"})
    given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    asked = CompletionRequest.model_validate(given)
    config = gateway.supervisor.resolve(body.model)
    wanted = (await apart(completion_plan, asked, config)).wanted
    async with aclosing(events_of(asked, wanted, gateway)) as events:
        async for _, event in events:
            yield event
