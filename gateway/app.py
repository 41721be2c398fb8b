"""The ASGI application: routes with and without `/v1`, inside the layers that every request passes.

From the outside in: log and metrics, admission, limits of bodies. Each layer is plain ASGI, so
streams pass through them unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline

from common.cache_folder import cache_folder
from common.version import VERSION
from gateway import exchange, openapi, refusals
from gateway.access import AccessMiddleware
from gateway.admission import AdmissionMiddleware
from gateway.bodies import BodyMiddleware
from gateway.context import Gateway
from gateway.exchange import Traffic
from gateway.metrics import Metrics
from gateway.openai.answering import warm_prompts
from gateway.routes import (
    adapters,
    chat,
    completions,
    embeddings,
    health,
    lm_studio,
    messages,
    models,
    ollama,
    page,
    rerank,
    responses,
    tokenize,
    transcriptions,
)
from gateway.settings import GatewaySettings
from gateway.supervisor.supervisor import Supervisor
from gateway.used_prompts import UsedPrompts

# Query parameters that SDKs of Anthropic and Azure add to every request.
_NEUTRAL_QUERY = {"beta", "api-version"}
PREFIXES = ("/v1", "", "/api/v0", "/api/v1", "/v2")  # LM Studio's, Lemonade's, Cohere's
_APIS = (
    adapters, chat, completions, embeddings, health, messages, models, rerank, responses, tokenize,
    transcriptions,
)  # fmt: skip
ROUTERS = (adapters.lists, *(api.router for api in _APIS))


async def list_unknown_query(request: Request) -> None:
    """List query parameters that a route does not have, such as `include`, as ignored fields."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = _NEUTRAL_QUERY.union(field.alias for field in route.dependant.query_params)
    for name in request.query_params:
        if name not in known:
            exchange.current().ignore(name)


def create_app(settings: GatewaySettings, supervisor: Supervisor, traffic: Traffic) -> FastAPI:
    """Return the application of one gateway; its lifespan starts and stops the supervisor."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await supervisor.start(lambda config: warm_prompts(config, gateway))
        try:
            yield
        finally:
            await supervisor.stop()
            prompts.save()

    prompts = UsedPrompts(None if settings.forget_prompts else cache_folder())
    gateway = Gateway(settings, supervisor, traffic, Metrics(), prompts)
    app = FastAPIOffline(  # /docs loads its scripts from the gateway, and nothing from elsewhere
        "/docs",
        None,
        static_url="/docs/static",
        favicon_url="/page/icon.svg",
        title="mlx-backend gateway",
        version=VERSION,
        summary="OpenAI's API, and those of llama.cpp, MLC-LLM and Anthropic, for local models",
        lifespan=lifespan,
        generate_unique_id_function=openapi.operation_id,
        redirect_slashes=False,
        dependencies=[Depends(list_unknown_query)],
    )
    app.state.gateway = gateway
    refusals.install(app)
    openapi.install(app)
    app.include_router(ollama.router)
    for router in (lm_studio.router, page.router, models.page_router):
        app.include_router(router, include_in_schema=False)
    for prefix, router in itertools.product(PREFIXES, ROUTERS):
        app.include_router(router, prefix=prefix, include_in_schema=prefix == "/v1")
    # The middleware added last is the outermost.
    app.add_middleware(BodyMiddleware, settings=settings)
    app.add_middleware(AdmissionMiddleware, settings=settings)
    app.add_middleware(
        AccessMiddleware, traffic=traffic, metrics=gateway.metrics, strict=settings.strict
    )
    return app
