"""Decides which programs and pages may call the gateway: by their key, their origin and their host.

Some paths need no key: the probes, which only report that the process is alive, and what a browser
must load before a key can be typed into it, the page and the API's description. They contain no
secrets and no names of models.

Any page that a user opens can send requests to this machine. Its browser names the page's origin in
`Origin`, and a page whose own host name resolves to 127.0.0.1 (DNS rebinding) shows that name in
`Host`. Programs without pages send no Origin and are not affected.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.wording import shown
from gateway import exchange
from gateway.errors import ApiError
from gateway.refusals import response_of
from gateway.settings import GatewaySettings, is_loopback

OPEN_PATHS = frozenset("/ /health /ping /ready /docs /openapi.json /favicon.ico".split())
OPEN_FOLDERS = ("/page/", "/docs/")


class KeyMiddleware:
    """Answers 401 to a request without one of the keys; without keys it lets every request in."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        """Store the keys, each of which may be preceded by a name and a space."""
        self._app = app
        parts = [key.rpartition(" ") for key in keys]
        self._keys = [(key.encode(), name) for name, _, key in parts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and not is_open(scope["path"]):
            given = key_of(Headers(scope=scope))
            if (name := self._name_of(given)) is None:
                refusal = _refusal(given)
                await response_of(refusal, scope)(scope, receive, send)
                return
            seen = exchange.current()
            # A key that replaces another under the same name reads what the other has stored.
            seen.key, seen.owner = name, name or f"key {sha256(given.encode()).hexdigest()}"
        await self._app(scope, receive, send)

    def _name_of(self, given: str) -> str | None:
        """Return the name of a key, which may be empty; None for an unknown key."""
        # All keys are compared, each in constant time, so the time taken reveals nothing.
        raw = given.encode("utf-8", "replace")
        names = [name for key, name in self._keys if hmac.compare_digest(raw, key)]
        return names[0] if names else None


def is_open(path: str) -> bool:
    bare = path.removeprefix("/v1") or "/"
    return bare in OPEN_PATHS or bare.startswith(OPEN_FOLDERS)


def key_of(headers: Headers) -> str:
    """Return the key of a request; "" if it has none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()


def _refusal(given: str) -> ApiError:
    if given:
        message = "this gateway does not accept this API key: check it"
    else:
        message = "an API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    return ApiError(
        401, message, code="invalid_api_key", extra_headers={"www-authenticate": "Bearer"}
    )


_METHODS = "GET, POST, DELETE"
_READABLE = "x-request-id, request-id, retry-after, x-should-retry, x-ignored-fields,"
_READABLE += " x-truncated-tokens"
_DAY = "86400"  # seconds
_PROGRAMS = ("app://", "tauri://", "vscode-webview://", "vscode-file://")  # no web page has these


class OriginMiddleware:
    """Refuses foreign pages and hosts with 403, and answers CORS preflights."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._origins = frozenset(settings.cors_origins)
        named = ("localhost", settings.host, *settings.allowed_hosts)
        # A key is sufficient proof, and a proxy in front may use any name for the gateway.
        self._hosts = None if settings.api_keys else frozenset(name.lower() for name in named)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        hosts = headers.getlist("host")
        if len(hosts) > 1 or not (hosts or scope["http_version"] == "1.0"):  # RFC 9112, 3.2
            sentence = f"the request has {len(hosts)} Host headers: send one"
            refusal: ApiError | None = ApiError(400, sentence)
        else:
            refusal = self._refusal(headers, origin)
        if refusal is not None:
            await response_of(refusal, scope)(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            await self._preflight(headers, origin)(scope, receive, send)
        else:
            listed = origin is not None and self._is_listed(origin)
            await self._app(scope, receive, _with_cors(send, origin or "") if listed else send)

    def _refusal(self, headers: Headers, origin: str | None) -> ApiError | None:
        host = headers.get("host", "")
        name = host_name(host)
        if self._hosts is not None and name not in self._hosts and not is_loopback(name):
            return ApiError(
                403,
                f"the host name {shown(host)} is not allowed: use localhost, or start the gateway"
                " with --allowed-host or an API key",
                code="host_not_allowed",
            )
        if origin is None or self._is_listed(origin) or is_same(origin, host):
            return None
        return ApiError(
            403,
            f"pages of {shown(origin)} may not call this gateway: allow them with --cors-origin",
            code="origin_not_allowed",
        )

    def _is_listed(self, origin: str) -> bool:
        named = not self._origins.isdisjoint(("*", origin.lower()))
        return named or origin.startswith(_PROGRAMS)

    def _preflight(self, headers: Headers, origin: str | None) -> Response:
        response = Response(headers={"allow": f"{_METHODS}, OPTIONS"})
        if origin is not None and self._is_listed(origin):
            _tell(response.headers, origin)
            response.headers["access-control-allow-methods"] = _METHODS
            # A bare * does not cover Authorization (Fetch standard, "CORS-safelisted").
            asked = headers.get("access-control-request-headers", "*")
            response.headers["access-control-allow-headers"] = asked
            response.headers["access-control-max-age"] = _DAY
        return response


def host_name(host: str) -> str:
    """Return the name in a Host header, without port and brackets; '' if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_same(origin: str, host: str) -> bool:
    """Return whether a page came from this gateway, regardless of TLS added by a proxy."""
    scheme, _, place = origin.lower().partition("://")
    return scheme in ("http", "https") and place != "" and place == host.lower()


def _with_cors(send: Send, origin: str) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            _tell(MutableHeaders(scope=message), origin)
        await send(message)

    return with_headers


def _tell(headers: MutableHeaders, origin: str) -> None:
    headers["access-control-allow-origin"] = origin
    headers["access-control-allow-credentials"] = "true"
    headers["access-control-expose-headers"] = _READABLE
    headers.add_vary_header("origin")
