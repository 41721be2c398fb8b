"""Access control: a key in `Authorization: Bearer` or `x-api-key`, if the gateway has keys.

Some paths need no key: the probes, which only report that the process is alive, and what a browser
must load before a key can be typed into it, the page and the API's description. They contain no
secrets and no names of models.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import exchange
from gateway.errors import ApiError
from gateway.refusals import response_of

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
