"""A request's body before anybody works with it: its size while it arrives, and that it is JSON.

FastAPI would read it all, take NaN for a number and any nesting for an answerable question. What
passes here is a JSON object of finite numbers and valid text, which every layer below can encode.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import exchange
from gateway.errors import ApiError
from gateway.leaving import run_until_left
from gateway.refusals import response_of
from gateway.settings import GatewaySettings

DEEPEST = 128  # arrays and objects inside each other; JSON schemas of tools rarely pass 20
BODY_SECONDS = 30.0  # silence in the middle of a body
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class BodyMiddleware:
    """Reads the body, or refuses it; then runs the request until its client leaves."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, paths: frozenset[str]) -> None:
        self._app = app
        self._settings = settings
        self._paths = paths  # those that take a JSON object; others are refused by the router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            _require_plain(Headers(scope=scope))
            body = await read_body(Headers(scope=scope), receive, self._settings.max_body_bytes)
            if scope["method"] == "POST" and scope["path"] in self._paths:
                parsed = parse(Headers(scope=scope).get("content-type"), body)
                exchange.note_model(str(parsed.get("model") or ""))
        except ApiError as refusal:
            await response_of(refusal, scope["path"])(scope, receive, send)
            return
        await run_until_left(self._app, scope, body, receive, send, self._settings.request_timeout)


def _require_plain(headers: Headers) -> None:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(
            400,
            f"Content-Encoding is {encoding[:40]!r}: send the body as it is, without compression",
            code="unsupported_content_encoding",
        )


async def read_body(headers: Headers, receive: Receive, largest: int) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is too long, 408 when it stands still."""
    # uvicorn refuses a length that is not a number, or digits without end.
    if int(headers.get("content-length", "0")) > largest:
        _too_large(largest)
    parts: list[bytes] = []
    length = 0
    more = True
    while more:
        try:
            message = await asyncio.wait_for(receive(), BODY_SECONDS)
        except TimeoutError:
            raise ApiError(
                408, f"no more of the body came for {BODY_SECONDS:.0f} s", code="request_timeout"
            ) from None
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the body ended early", code="request_aborted")
        parts.append(message.get("body", b""))
        length += len(parts[-1])
        if length > largest:
            _too_large(largest)
        more = message.get("more_body", False)
    return b"".join(parts)


def parse(content_type: str | None, body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiError 400."""
    if not body.strip():
        raise ApiError(400, "the request has no body: send a JSON object")
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            400,
            f"Unsupported content type: {kind[:100]!r}. Send 'Content-Type: application/json'",
            code="unsupported_content_type",
        )
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _not_json(f"byte {error.start} is not UTF-8")
    if body.count(b"[") + body.count(b"{") > DEEPEST:
        _check_depth(text)
    try:
        parsed = json.loads(text, parse_constant=_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        _not_json(f"{error.msg} at line {error.lineno} column {error.colno}")
    except ValueError as error:
        # Ours, or Python's own for a whole number of thousands of digits.
        _not_json(str(error) if isinstance(error, _BadNumber) else "a number has too many digits")
    if not isinstance(parsed, dict):
        raise ApiError(400, f"the body is {_kind_of(parsed)}: send a JSON object")
    if _SURROGATE.search(body):
        _check_text(parsed)
    return parsed


class _BadNumber(ValueError):
    pass


def _constant(name: str) -> NoReturn:
    raise _BadNumber(f"{name} is no number in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _BadNumber(f"{text[:40]} is too large")
    return value


_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def _check_depth(text: str) -> None:
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        found = match[0]
        if found in "[{":
            depth += 1
            if depth > DEEPEST:
                raise ApiError(400, f"the body nests deeper than {DEEPEST} levels: flatten it")
        elif found in "]}":
            depth -= 1


def _check_text(parsed: dict[str, Any]) -> None:
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(
            400, "a text in the body holds half a surrogate pair (\\ud800 to \\udfff): send UTF-8"
        ) from None


def _kind_of(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "a text"
    return "null" if value is None else "a number, true or false"


def _not_json(why: str) -> NoReturn:
    raise ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json") from None


def _too_large(largest: int) -> NoReturn:
    raise ApiError(
        413,
        f"the body is larger than {largest} bytes: send less, or start the gateway with a larger"
        " --max-body-bytes",
        code="request_too_large",
        extra_headers={"connection": "close"},
    )
