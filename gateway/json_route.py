"""Routes whose body is JSON, which is checked before it is used.

FastAPI would read any amount, accept NaN as a number, and accept any nesting. Only a JSON object of
finite numbers and valid text passes, which every layer below can encode.
"""

from __future__ import annotations

import json
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
from gateway.errors import ApiError, bad_field
from gateway.refusals import invalid
from gateway.threads import offload, on_thread

# Nesting: the limit of pydantic's JSON parser, which counts only non-empty lists and objects.
DEEPEST = 200
MOST_OBJECTS = 200_000
MOST_VALUES = 1_100_000  # a prompt of 2**20 token ids, and some more; reading these takes 60 ms
MOST_FIELDS = 300_000  # reading as many different names takes 100 ms
_THREADED = 32 << 10  # bytes of a body whose check may take 10 ms
_MARK = b"\xef\xbb\xbf"  # which editors and shells of Windows put before UTF-8
_NO_MARKS = bytes(set(range(256)) - set(b'",:[{'))
# The latter two are curl's default, and aiohttp's, as LiteLLM calls Ollama.
_UNNAMED = ("", "application/x-www-form-urlencoded", "application/octet-stream")
_KINDS = {list: "a list", str: "a string", NoneType: "null"}
_TWO = rb"[0-9a-fA-F]{2}"
# Half of a surrogate pair, and the other half if it follows. It begins with plain characters, which
# are found a hundred times as fast.
_HALVES = re.compile(rb"\\u[dD](?:[89abAB]%b(\\u[dD][c-fC-F]%b)?|[c-fC-F]%b)" % (_TWO, _TWO, _TWO))


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
            if self.body_field is not None:
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
        assert self.body_field is not None
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
    fields = _fields(body)
    try:
        try:
            parsed = from_json(body, allow_inf_nan=False)
        except ValueError:
            if exchange.current().strict:
                raise
            # An agent cuts a tool's output in the middle of an emoji, and then sends it for ever.
            body = _with_whole_pairs(body)
            parsed = from_json(body, allow_inf_nan=False)
        if not isinstance(parsed, dict):
            kind = _KINDS.get(type(parsed), "a number, true or false")
            raise ApiError(400, f"the body is {kind}: send a JSON object")
        if fields > _finite_fields(parsed):  # an object has one of them twice
            json.loads(body, object_pairs_hook=_agreeing)
    except ValueError as error:
        if str(error).startswith("recursion limit"):
            message = f"the body nests deeper than {DEEPEST} levels: flatten it"
            raise ApiError(400, message) from None
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    return parsed


def _with_whole_pairs(body: bytes | bytearray) -> bytearray:
    """Return a copy with U+FFFD, in an escape of the same length, for each half of a pair."""
    copy = bytearray(body)
    for found in _HALVES.finditer(body):
        begin = found.start()
        while begin and body[begin - 1] == ord("\\"):
            begin -= 1
        is_text = (found.start() - begin) % 2 == 1  # its backslash is itself escaped
        if is_text == (found[1] is not None):
            copy[found.end() - 6 : found.end()] = rb"\ufffd"
    return copy


def _fields(body: bytes | bytearray) -> int:
    """Return the number of fields of all objects together.

    Raises ApiError for a body of so many parts that reading them would stop all streams, or take
    much more memory than the body: an empty list takes 3 bytes of it, and then 60.
    """
    # The brackets, colons and commas, and those quotes that begin or end a string.
    escaped = b"\\" in body
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"") if escaped else body
    bare = bare.translate(None, _NO_MARKS)
    strings = bare.count(b'"') // 2
    marks = b"" if strings > MOST_VALUES else b"".join(bare.split(b'"')[::2])
    fields = marks.count(b":")
    for count, most, parts in (
        (max(strings, marks.count(b",")), MOST_VALUES, "values"),
        (marks.count(b"[") + marks.count(b"{"), MOST_OBJECTS, "lists and objects"),
        (fields, MOST_FIELDS, "fields"),
    ):
        if count > most:
            raise ApiError(400, f"the body has more than {most} {parts}: send less")
    return fields


def _agreeing(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises ApiError for a field that it has twice, with different values."""
    found: dict[str, Any] = {}
    for name, value in fields:
        if found.setdefault(name, value) != value:
            raise bad_field(
                f"{shown(name)} is in the same object twice, with different values: send it once",
                param=name[:64],
            )
    return found


def _finite_fields(parsed: dict[str, Any]) -> int:
    """Return how many fields all objects have together, where a repeated field counts once.

    Raises ApiError for a number such as 1e999, which is parsed as infinite and cannot be written as
    JSON.
    """
    count = 0
    inner: list[Any] = [parsed]
    while inner:
        node = inner.pop()
        values = node
        if isinstance(node, dict):
            count, values = count + len(node), node.values()
        kinds = set(map(type, values))  # a list may have millions of numbers
        if float in kinds and (math.inf in values or -math.inf in values):
            raise ApiError(
                400, "the body is not valid JSON: a number is too large", code="invalid_json"
            )
        if dict in kinds or list in kinds:
            inner += [value for value in values if isinstance(value, dict | list)]
    return count
