"""The outermost layer of a request: its id, log line and metrics, and the last exception handler.

A body or a key is never logged; the path and the model's name are, as the client wrote them.
"""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.log_lines import traceback_of
from gateway import exchange, logs
from gateway.admission import is_open
from gateway.errors import RETRY_AFTER, SERVER, ApiError
from gateway.exchange import CLIENT_LEFT, Exchange, Traffic
from gateway.metrics import Metrics
from gateway.refusals import response_of

_REGULAR = frozenset({"/metrics", "/api/status"})
_BASE = re.compile("/+((?:v1/+)*)")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_DRAINING = ApiError(
    503,
    "this gateway is shutting down: send the request again later",
    SERVER,
    "draining",
    retry_after=RETRY_AFTER,
    extra_headers={"connection": "close"},
)


class AccessMiddleware:
    """The middleware that counts and logs requests, and answers an uncaught exception with 500."""

    def __init__(self, app: ASGIApp, traffic: Traffic, metrics: Metrics, strict: bool) -> None:
        self._app = app
        self._strict = strict
        self._traffic = traffic
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")  # used if it is harmless
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        seen = Exchange(request_id, scope["method"], scope["path"], strict=self._strict)
        exchange.begin(seen)
        watched = self._watched(seen, send)
        # Probes use HEAD; the server leaves the body out.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "method": method, "path": _plain(scope["path"])}
        try:
            with self._traffic.request(seen):
                if self._traffic.draining and not is_open(scope["path"]):
                    await response_of(_DRAINING, scope)(scope, receive, watched)
                else:
                    await self._app(scope, receive, watched)
        except Exception as failure:
            logs.error("uncaught", request=seen.request_id, traceback=traceback_of(failure))
            if seen.status:
                # The head has already been sent, so only a cut connection can show the failure.
                raise ConnectionAbortedError from None
            message = f"the gateway failed on this request; see {seen.request_id} in its log"
            error = ApiError(500, message, SERVER, "internal_error")
            await response_of(error, scope)(scope, receive, watched)
        finally:
            self._close(seen, scope)

    def _watched(self, seen: Exchange, send: Send) -> Send:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = seen.request_id
                headers["request-id"] = seen.request_id  # where Anthropic's clients look for it
                headers["x-content-type-options"] = "nosniff"
                if seen.ignored:
                    headers["x-ignored-fields"] = ",".join(seen.ignored)
                if seen.truncated:
                    headers["x-truncated-tokens"] = str(seen.truncated)
                seen.status = message["status"]
                seen.streams = headers.get("content-type", "").startswith("text/event-stream")
                if seen.streams:
                    self._metrics.running_streams.inc()
            elif seen.first_byte is None and message.get("body"):
                seen.first_byte = seen.seconds
            await send(message)

        return watched

    def _close(self, seen: Exchange, scope: Scope) -> None:
        seen.route = getattr(scope.get("route"), "path", "")
        if seen.streams:
            self._metrics.running_streams.dec()
        status = CLIENT_LEFT if seen.left else seen.status
        self._metrics.observe(seen, status)
        fields: dict[str, object] = {
            "request": seen.request_id,
            "method": seen.method,
            "path": seen.path,
            "status": status,
            "ms": seen.seconds * 1000,
        }
        known = {"error": seen.broken, "key": seen.key, "model": seen.model}
        known["ignored"] = ",".join(seen.ignored)
        known["truncated"] = str(seen.truncated or "")
        fields |= {name: text for name, text in known.items() if text}
        if seen.prompt_tokens or seen.completion_tokens:
            fields |= {"prompt": seen.prompt_tokens, "completion": seen.completion_tokens}
        # Frequent requests of probes, Prometheus and the page would hide the others.
        regular = is_open(seen.path) or seen.path.removeprefix("/v1") in _REGULAR
        (logs.debug if regular else logs.info)("request", **fields)


def _plain(path: str) -> str:
    """Return a path without the doubled slashes, or the second `/v1`, that a base URL may add.

    Later slashes stay, because the name of a model may be an absolute path.
    """
    base = _BASE.match(path)
    if base is None:
        return path
    return ("/v1/" if base[1] else "/") + path[base.end() :].rstrip("/")
