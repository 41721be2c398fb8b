"""Errors in Anthropic's form (API reference, "Errors"), for `/messages` and paths below it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway import exchange
from gateway.errors import ApiError
from gateway.refusals import TEXT, ErrorForm, schema_of

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def type_of(status: int) -> str:
    """Return Anthropic's error type for an HTTP status."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def body(error: ApiError) -> dict[str, Any]:
    """Return the error object; the message begins with the field at fault."""
    described = {"type": type_of(error.status), "message": error.sentence}
    request_id = exchange.current().request_id
    return {"type": "error", "error": described, "request_id": request_id}


def event(error: ApiError) -> str:
    """Return the event that ends a stream with this error."""
    return f"event: error\ndata: {json.dumps(body(error))}\n\n"


ERRORS = ErrorForm(
    "AnthropicError",
    schema_of(type={"const": "error"}, error=schema_of(type=TEXT, message=TEXT), request_id=TEXT),
    body,
)
