"""Routes whose body is JSON, which is checked before it is used.

FastAPI would read any amount, accept NaN as a number, and accept any nesting. Only a JSON object of
finite numbers and valid text passes, which every layer below can encode.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Coroutine
from types import NoneType
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from common.wording import shown
from gateway import exchange
from gateway.bodies import pop_body
from gateway.errors import ApiError
from gateway.refusals import invalid
from gateway.threads import offload, on_thread

# Nesting: the limit of pydantic's JSON parser, which counts only non-empty lists and objects.
DEEPEST = 200
MOST_OBJECTS = 200_000
_FAR_APART = 12  # bytes
_THREADED = 32 << 10  # bytes of a body whose check may take 10 ms
_MARK = b"\xef\xbb\xbf"  # which editors and shells of Windows put before UTF-8
_NO_MARKS = bytes(set(range(256)) - set(b'"[{'))
# The latter two are curl's default, and aiohttp's, as LiteLLM calls Ollama.
_UNNAMED = ("", "application/x-www-form-urlencoded", "application/octet-stream")
_KINDS = {list: "a list", str: "a string", NoneType: "null"}
_HALF = rb"\\u[dD][%b][0-9a-fA-F]{2}"
_HIGH, _LOW = _HALF % b"89abAB", _HALF % b"c-fC-F"
# Half of a surrogate pair; before it, backslashes of which each escapes another.
_HALVES = re.compile(rb"((?<!\\)(?:\\\\)*)(?:(%b%b)|%b|%b)" % (_HIGH, _LOW, _HIGH, _LOW))


class JsonRoute(APIRoute):
    """A route that parses and checks its body itself."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that also checks the body.

        FastAPI documents this way to extend routes.
        """
        handle = super().get_route_handler()

        async def with_body(request: Request) -> Response:
            # Free the body, because it may be large and the request may take long.
            body = pop_body(request.scope)
            if "POST" in (self.methods or ()) or self.body_field is not None:
                parsed = await parse(Headers(scope=request.scope), self._object(body))
                exchange.current().model = str(parsed.get("model") or "")[:200]
                MutableHeaders(scope=request.scope)["content-type"] = "application/json"
                # FastAPI accepts an object that is valid already.
                request._json = await offload(self._checked, parsed)
                del parsed
            del body
            return await handle(request)

        return with_body

    def _object(self, body: bytearray) -> bytearray:
        return body

    def _checked(self, body: dict[str, Any]) -> Any:
        if self.body_field is None:
            return body
        checked, problems = self.body_field.validate(body, {}, loc=("body",))
        if problems:
            raise invalid(problems)
        return checked


class ListRoute(JsonRoute):
    """A route whose body is a list, which becomes `adapters` of an object."""

    def _object(self, body: bytearray) -> bytearray:
        return bytearray(b'{"adapters":%b}' % bytes(body)) if body else body


async def parse(headers: Headers, body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ApiError 400.

    Programs may send it without a content type, as curl does. A web page may not: browsers ask for
    permission before they send JSON to another origin, but not before they send a form.
    """
    if not body or body.isspace():  # `strip` would copy it
        raise ApiError(400, "the request has no body: send a JSON object")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and ("origin" in headers or kind not in _UNNAMED):
        raise ApiError(
            400,
            f"Unsupported content type: {shown(kind)}. Send 'Content-Type: application/json'",
            code="unsupported_content_type",
        )
    if len(body) <= _THREADED:
        return _parsed(body)
    exchange.current().long = True
    return await on_thread(_parsed, body)


def _parsed(body: bytes | bytearray) -> dict[str, Any]:
    if body.startswith(_MARK):
        body = body[len(_MARK) :]
    if _objects(body) > MOST_OBJECTS:
        raise ApiError(400, f"the body has more than {MOST_OBJECTS} lists and objects: send less")
    try:
        try:
            parsed = from_json(body, allow_inf_nan=False)
        except ValueError:
            if exchange.current().strict:
                raise
            # An agent cuts a tool's output in the middle of an emoji, and then sends it for ever.
            parsed = from_json(_HALVES.sub(_whole, body), allow_inf_nan=False)
    except ValueError as error:
        if str(error).startswith("recursion limit"):
            message = f"the body nests deeper than {DEEPEST} levels: flatten it"
            raise ApiError(400, message) from None
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        kind = _KINDS.get(type(parsed), "a number, true or false")
        raise ApiError(400, f"the body is {kind}: send a JSON object")
    _require_finite(parsed)
    return parsed


def _whole(found: re.Match[bytes]) -> bytes:
    """Return U+FFFD for half of a surrogate pair, and a complete pair unchanged."""
    return found[0] if found[2] else found[1] + rb"\ufffd"


def _objects(body: bytes | bytearray) -> int:
    """Return the number of lists and objects, exact only if they are many and close together.

    An empty list takes 3 bytes of a body and 60 of memory, so 50 MiB could become 1 GiB.
    """
    count = body.count(b"[") + body.count(b"{")
    if count <= MOST_OBJECTS or count * _FAR_APART < len(body):
        return 0
    # Brackets inside strings, such as code, cost nothing.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    return sum(map(len, bare.split(b'"')[::2]))


def _require_finite(parsed: dict[str, Any]) -> None:
    """Refuse numbers such as 1e999, which are parsed as infinite and cannot be written as JSON."""
    inner: list[Any] = [parsed]
    while inner:
        node = inner.pop()
        values = node.values() if isinstance(node, dict) else node
        kinds = set(map(type, values))  # a list may have millions of numbers
        if float in kinds and (math.inf in values or -math.inf in values):
            raise ApiError(
                400, "the body is not valid JSON: a number is too large", code="invalid_json"
            )
        if dict in kinds or list in kinds:
            inner += [value for value in values if isinstance(value, dict | list)]
