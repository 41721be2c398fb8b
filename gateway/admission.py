"""Decides which programs and pages may call the gateway: by their key, their origin and their host.

Some paths need no key: probes, which only report that the process is alive; the page, into which
the user types the key; and the description of the API. They contain no secrets or names of models.

Any page that a user opens can send requests to this machine. Its browser names the page's origin in
`Origin`, and a page whose own host name resolves to 127.0.0.1 (DNS rebinding) shows that name in
`Host`. Programs without pages send no Origin and are not affected.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from common.wording import shown
from gateway import exchange
from gateway.errors import ApiError
from gateway.refusals import response_of
from gateway.settings import GatewaySettings, is_loopback

OPEN_PATHS = frozenset("/ /health /ping /ready /docs /openapi.json /favicon.ico".split())
OPEN_FOLDERS = ("/page/", "/docs/")


_METHODS = ("GET", "POST", "DELETE")
_READABLE = (
    "x-request-id request-id retry-after x-should-retry x-ignored-fields x-truncated-tokens".split()
)
_DAY = 86_400  # seconds
_PROGRAMS = "(app|tauri|vscode-webview|vscode-file)://.*"  # no web page has these origins


class AdmissionMiddleware:
    """The middleware that refuses foreign pages and hosts with 403, and answers CORS preflights.

    If the gateway has keys, a request without one of them gets a 401.
    """

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._cors = CORSMiddleware(
            self._with_key,
            allow_origins=settings.cors_origins,
            allow_origin_regex=_PROGRAMS,
            allow_methods=_METHODS,
            allow_headers=("*",),
            allow_credentials=True,
            allow_private_network=True,  # a page from the internet may be listed
            expose_headers=_READABLE,
            max_age=_DAY,
        )
        named = ("localhost", settings.host, *settings.allowed_hosts)
        # A key is sufficient proof, and a proxy in front may use any name for the gateway.
        self._hosts = None if settings.api_keys else frozenset(name.lower() for name in named)
        parts = [key.rpartition(" ") for key in settings.api_keys]  # a name may precede a key
        self._keys = [(key.encode(), name) for name, _, key in parts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if (refusal := self._foreign(headers, origin, scope["http_version"])) is not None:
            await response_of(refusal, scope)(scope, receive, send)
        else:
            await (self._with_key if origin is None else self._cors)(scope, receive, send)

    async def _with_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["method"] == "OPTIONS":
            app = Response(headers={"allow": ", ".join((*_METHODS, "OPTIONS"))})
        elif not is_open(scope["path"]):
            refusal = self._without_key(key_of(Headers(scope=scope)))
            app = app if refusal is None else response_of(refusal, scope)
        await app(scope, receive, send)

    def _without_key(self, given: str) -> ApiError | None:
        """Return the refusal of a request; None if its key is accepted, which is then recorded."""
        if not self._keys:
            return None
        # All keys are compared, each in constant time, so the time taken reveals nothing.
        raw = given.encode("utf-8", "replace")
        names = [name for key, name in self._keys if hmac.compare_digest(raw, key)]
        if names:
            seen = exchange.current()
            # A new key under an old name can read what was stored with the old key.
            seen.key, seen.owner = names[0], names[0] or f"key {sha256(given.encode()).hexdigest()}"
            return None
        message = "an API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        if given:
            message = "this gateway does not accept this API key: check it"
        headers = {"www-authenticate": "Bearer"}
        return ApiError(401, message, code="invalid_api_key", extra_headers=headers)

    def _foreign(self, headers: Headers, origin: str | None, version: str) -> ApiError | None:
        hosts = headers.getlist("host")
        if len(hosts) > 1 or not (hosts or version == "1.0"):  # RFC 9112, 3.2
            return ApiError(400, f"the request has {len(hosts)} Host headers: send one")
        host = headers.get("host", "")
        name = host_name(host)
        if self._hosts is not None and name not in self._hosts and not is_loopback(name):
            return ApiError(
                403,
                f"the host name {shown(host)} is not allowed: use localhost, or start the gateway"
                " with --allowed-host or an API key",
                code="host_not_allowed",
            )
        if origin is None or self._cors.is_allowed_origin(origin) or is_same(origin, host):
            return None
        return ApiError(
            403,
            f"pages of {shown(origin)} may not call this gateway: allow them with --cors-origin",
            code="origin_not_allowed",
        )


def is_open(path: str) -> bool:
    """Return whether a path needs no key."""
    bare = path.removeprefix("/v1") or "/"
    return bare in OPEN_PATHS or bare.startswith(OPEN_FOLDERS)


def key_of(headers: Headers) -> str:
    """Return the key of a request; "" if it has none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()


def host_name(host: str) -> str:
    """Return the name in a Host header, without port and brackets; '' if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_same(origin: str, host: str) -> bool:
    """Return whether a page came from this gateway, regardless of TLS added by a proxy."""
    scheme, _, address = origin.lower().partition("://")
    return scheme in ("http", "https") and address != "" and address == host.lower()
