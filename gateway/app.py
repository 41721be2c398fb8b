"""The ASGI application: the routes with and without `/v1`, and errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from gateway.context import Gateway
from gateway.errors import ApiError
from gateway.routes import chat, health, models, page
from gateway.settings import GatewaySettings
from gateway.supervisor.supervisor import Supervisor

ROUTERS = (chat.router, health.router, models.router)


def create_app(settings: GatewaySettings, supervisor: Supervisor) -> FastAPI:
    """The application of one gateway; its lifespan starts and stops the supervisor."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await supervisor.start()
        try:
            yield
        finally:
            await supervisor.stop()

    app = FastAPI(title="mlx-backend gateway", lifespan=lifespan)
    app.state.gateway = Gateway(settings, supervisor)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    for router in ROUTERS:
        app.include_router(router, prefix="/v1")
        app.include_router(router, include_in_schema=False)
    app.include_router(page.router, include_in_schema=False)
    return app


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers())


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:])
    return await _refused(request, ApiError(400, f"{place}: {first['msg']}", param=place or None))
