"""Ollama's API under `/api`: answers, vectors, and the models."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from common.device_memory import has_graphics
from gateway import exchange
from gateway.calls import Event
from gateway.context import Gateway, GatewayDep
from gateway.errors import ApiError
from gateway.fields import Request
from gateway.json_route import JsonRoute
from gateway.models.config import ModelConfig
from gateway.ollama.answer import ERRORS, Json, OllamaAnswer, chat_part, durations, text_part
from gateway.ollama.request import (
    WITHOUT_TEMPLATE,
    ChatRequest,
    GenerateRequest,
    ModelName,
    chat_request,
    without_template,
)
from gateway.openai.answering import answer, client_paths, events_of, question_of
from gateway.openai.completion import CompletionRequest, completion_plan
from gateway.refusals import FORMS
from gateway.routes.embeddings import EmbeddingRequest, Input, in_parts, vectors_of
from gateway.routes.models import with_adapters
from gateway.sse import respond
from gateway.supervisor.instance import State
from gateway.threads import offload

VERSION = "0.12.11"  # whose API this follows
_NOW = (0, "0", "0s", "0m")  # values of keep_alive that unload a model at once
_NEVER = datetime(2300, 1, 1, tzinfo=UTC).timestamp()  # which Ollama's command shows as Forever
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


class CopyRequest(Request):
    """A model, and its other name."""

    source: ModelName
    destination: ModelName


class EmbeddingsRequest(Request):
    """One text to embed, in the older form."""

    model: ModelName = Field(min_length=1)
    prompt: str = Field(min_length=1)


class EmbedRequest(Request):
    """Texts to embed."""

    model: ModelName = Field(min_length=1)
    input: Input
    dimensions: int | None = Field(default=None, ge=1)
    truncate: bool | None = None
    keep_alive: str | float | None = None


@router.post("/api/chat", responses=_ANSWERS)
async def chat(body: ChatRequest, gateway: GatewayDep) -> Response:
    """Return the next turn of a conversation."""
    return await _answered(body, gateway, chat_part)


@router.post("/api/generate", responses=_ANSWERS)
async def generate(body: GenerateRequest, gateway: GatewayDep) -> Response:
    """Return the answer to one prompt."""
    return await _answered(body, gateway, text_part)


@router.post("/api/embed")
async def embed(body: EmbedRequest, gateway: GatewayDep) -> Response:
    """Return the vectors of texts."""
    asked = await offload(
        lambda: EmbeddingRequest.model_validate(body.model_dump(exclude={"keep_alive"}))
    )
    vectors, tokens = await vectors_of(asked, gateway)
    if _leaves(body.keep_alive):
        await _unload_if_idle(body.model, gateway)
    others = {"model": body.model, **durations(), "prompt_eval_count": tokens}
    return in_parts("embeddings", map(list, vectors), others)


@router.post("/api/embeddings")
async def embeddings(body: EmbeddingsRequest, gateway: GatewayDep) -> dict[str, Any]:
    """Return the vector of one text, as older programs ask for it."""
    asked = EmbeddingRequest.model_validate({"model": body.model, "input": body.prompt})
    vectors, _ = await vectors_of(asked, gateway, "prompt")
    return {"embedding": list(next(vectors))}


@router.get("/api/tags")
async def tags(gateway: GatewayDep) -> dict[str, Any]:
    """Return the models of the folder, and their adapters."""
    models = gateway.supervisor.models
    adapters = with_adapters(models)
    return {
        "models": [
            _tag(gateway, model, name)
            for model in models
            for name in (model.name, *adapters[model.name])
        ]
    }


@router.get("/api/ps")
async def running(gateway: GatewayDep) -> dict[str, Any]:
    """Return the loaded models, each with its memory and the time when it is unloaded if idle."""
    configs = {model.name: model for model in gateway.supervisor.models}
    return {
        "models": [
            _tag(gateway, configs[now.name])
            | {
                "size": now.memory_bytes,
                "size_vram": now.memory_bytes if has_graphics() else 0,
                "expires_at": _time(_NEVER if now.leaves_at is None else now.leaves_at),
                "context_length": gateway.supervisor.context_size(configs[now.name]),
            }
            for now in gateway.supervisor.status()
            if now.state is State.READY and now.name in configs
        ]
    }


@router.post("/api/show")
async def show(body: ShowRequest, gateway: GatewayDep) -> dict[str, Any]:
    """Return what is known of a model without loading it."""
    model = gateway.supervisor.resolve(body.model or body.name)
    limit = gateway.supervisor.context_size(model)
    known = {"mlx.context_length": limit} if limit else {}
    abilities = gateway.supervisor.checkpoints.abilities(model)
    return {
        "modelfile": "",
        "parameters": f"num_ctx {limit}" if limit else "",
        "template": "{{ .Prompt }}{{ .Suffix }}" if "insert" in abilities else "",
        "details": _tag(gateway, model)["details"],
        "model_info": {"general.architecture": "mlx", "general.basename": model.name, **known},
        "capabilities": abilities,
    }


@router.post("/api/pull", responses=_ANSWERS)
async def pull(body: ShowRequest, gateway: GatewayDep) -> Response:
    """Do nothing for a model of the folder, which is downloaded when it is first used."""
    gateway.supervisor.resolve(body.model or body.name)
    return Response('{"status":"success"}\n', media_type="application/x-ndjson")


@router.post("/api/copy", response_class=Response)
async def copy(body: CopyRequest, gateway: GatewayDep) -> Response:
    """Give a model another name as well. Its file is copied, but not its weights."""
    gateway.require_one_owner()
    gateway.supervisor.catalogue.copy(body.source, body.destination)
    return Response()


@router.delete("/api/delete", response_class=Response)
async def delete(body: ShowRequest, gateway: GatewayDep) -> Response:
    """Stop serving a model. Its file, or its folder if it has no file, is hidden, not erased."""
    gateway.require_one_owner()
    name = body.model or body.name or gateway.supervisor.resolve(None).name
    await gateway.supervisor.remove(name)
    return Response()


@router.get("/api/version")
async def version() -> dict[str, str]:
    """Return the version of Ollama whose API this follows."""
    return {"version": VERSION}


def _tag(gateway: Gateway, model: ModelConfig, name: str = "") -> Json:
    return {
        **dict.fromkeys(("name", "model"), name or model.name),
        "modified_at": _time(gateway.started),
        "size": gateway.supervisor.checkpoints.weight_bytes(model),
        "digest": hashlib.sha256(model.model_dump_json().encode()).hexdigest(),
        "details": {
            **dict.fromkeys(("parent_model", "parameter_size", "quantization_level"), ""),
            **dict.fromkeys(("format", "family"), "mlx"),
            "families": ["mlx"],
        },
    }


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


async def _answered(
    body: ChatRequest | GenerateRequest,
    gateway: Gateway,
    part: Callable[[str, str, list[Json]], Json],
) -> Response:
    reply = OllamaAnswer(body.model, part)
    leaves = _leaves(body.keep_alive)
    if (translation := await offload(chat_request, body)) is None:
        if leaves:
            await gateway.supervisor.unload(body.model)
            return JSONResponse(reply.empty("unload"))
        await gateway.supervisor.load(body.model)
        return JSONResponse(reply.empty("load"))
    if isinstance(body, GenerateRequest) and (body.raw or body.suffix):
        events = _raw(without_template(body, translation), gateway)
    else:
        events = answer(await question_of(translation, gateway), gateway)
    if leaves:
        events = _then_unload(events, body.model, gateway)
    return await respond(events, reply, gateway.settings, streams=body.stream is not False)


def _leaves(keep_alive: str | float | None) -> bool:
    """Return whether to unload the model at once; the model's file sets all other times."""
    if keep_alive is not None and keep_alive not in _NOW:
        exchange.current().ignore("keep_alive")
    return keep_alive in _NOW


async def _then_unload(
    events: AsyncGenerator[Event, None], model: str, gateway: Gateway
) -> AsyncGenerator[Event, None]:
    """Yield the events, then unload the model unless other requests use it."""
    async with aclosing(events):
        async for event in events:
            yield event
    await _unload_if_idle(model, gateway)


async def _unload_if_idle(model: str, gateway: Gateway) -> None:
    with suppress(ApiError):  # other requests use it
        await gateway.supervisor.unload(model)


async def _raw(asked: CompletionRequest, gateway: Gateway) -> AsyncGenerator[Event, None]:
    config = gateway.supervisor.resolve(asked.model)
    with client_paths(WITHOUT_TEMPLATE):
        wanted = (await offload(completion_plan, asked, config)).wanted
        async with aclosing(events_of(asked, wanted, gateway)) as events:
            async for _, event in events:
                yield event
