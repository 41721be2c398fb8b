"""The OpenAPI document: the errors that every operation may answer are added here, once.

FastAPI documents its own 422 for bodies that do not validate; here that is a 400 like any other
error, in OpenAI's error object.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from gateway.refusals import FORMS, OPENAI, form_of

# One event of a stream as a client sees it: OpenAPI 3.1 has no term for streams.
EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}

EVERYWHERE = {
    "400": "The request cannot be served as it is: `param` names the field.",
    "401": "No API key, or a wrong one.",
    "403": "A web page or host that is not allowed.",
    "404": "There is no such model.",
    "405": "The path does not accept this method.",
    "408": "The body stopped arriving, or arrived too slowly.",
    "413": "The body is larger than the gateway accepts.",
    "429": "The model's queue is full: retry after the given seconds.",
    "500": "The gateway or a backend failed.",
    "502": "A backend refused the gateway.",
    "503": "Loading, restarting or stopping: retry after the given seconds.",
    "504": "It took longer than a request may.",
}
Responses = dict[int | str, dict[str, Any]]


def streamed(answer: str, data: str) -> Responses:
    """Return FastAPI's `responses` of a route whose answer may be a stream.

    Answers are described in words, because their form is documented by the API that each follows.

    data: the description of an event's data.
    """
    forms = {
        "application/json": {"schema": {"type": "object", "description": answer}},
        "text/event-stream": {"schema": {**EVENT, "description": data}},
    }
    return {200: {"description": "The answer, or with `stream` its events.", "content": forms}}


def operation_id(route: APIRoute) -> str:
    """Return a unique, stable name, such as `chat_completions_post` for POST /chat/completions."""
    words = re.sub(r"[^a-z0-9]+", "_", route.path_format.lower().removeprefix("/v1")).strip("_")
    return f"{words}_{'_'.join(sorted(route.methods or ())).lower()}"


def install(app: FastAPI) -> None:
    """Serve the document with the gateway's errors.

    Building the document takes a second, during which streams must continue: it is built once, on a
    thread, and FastAPI's own route, which would block, is replaced.
    """
    making: asyncio.Future[bytes] | None = None

    def document() -> dict[str, Any]:
        about: dict[str, Any] = {"title": app.title, "version": app.version, "summary": app.summary}
        return with_refusals(get_openapi(**about, routes=app.routes))

    async def describe(_: Request) -> Response:
        nonlocal making
        if making is None:
            making = asyncio.ensure_future(
                asyncio.to_thread(lambda: json.dumps(document()).encode())
            )
        # A client that disconnects must not cancel it for the others that wait.
        return Response(await asyncio.shield(making), media_type="application/json")

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's own way to extend it
    place = app.openapi_url or ""
    app.router.routes[:] = [each for each in app.routes if getattr(each, "path", "") != place]
    app.add_route(place, describe, include_in_schema=False)


def with_refusals(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with the errors of EVERYWHERE on every operation, in its API's form."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= {form.name: form.schema for form in (OPENAI, *FORMS.values())}
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            schema = {"$ref": f"#/components/schemas/{form_of(path).name}"}
            content = {"application/json": {"schema": schema}}
            for status, meaning in EVERYWHERE.items():
                responses.setdefault(status, {"description": meaning, "content": content})
    return document
