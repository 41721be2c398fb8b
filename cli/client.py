"""Calls a running gateway, and turns its errors into messages for the user."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
)
from typing import Any
from urllib.parse import quote, urlsplit

import click

DEFAULT_URL = "http://127.0.0.1:8080"
_CONNECT_SECONDS = 10.0
_HEALTH_SECONDS = 5.0
_KINDS = {"http": HTTPConnection, "https": HTTPSConnection}


class Refused(click.ClickException):
    """The gateway refused a request, or there is no gateway; `str()` says why."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the gateway at `url`, with an API key if the gateway needs one."""

    url: str = DEFAULT_URL
    key: str = ""

    def __post_init__(self) -> None:
        """Raise UsageError if `url` is not an HTTP address."""
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in _KINDS and parts.hostname and parts.port != 0
            if parts.username is not None or parts.password is not None:
                raise click.UsageError("--url contains a user name: give the key as --api-key")
        except ValueError:
            usable = False
        if not usable:
            raise click.UsageError(f"--url is {self.url!r}: give one such as {DEFAULT_URL}")

    def runs(self) -> bool:
        """Return whether a gateway answers at the address."""
        try:
            with self._sent("GET", "/health", None, _HEALTH_SECONDS):
                return True
        except Refused:
            return False

    def get(self, path: str) -> Any:
        """Send a GET request, and return the JSON of the response. Raises Refused."""
        with self._sent("GET", path, None) as answer:
            return json.loads(answer.read())

    def unload(self, model: str) -> None:
        """Unload a model. Raises Refused."""
        with self._sent("POST", "/v1/models/unload", {"model": model}):
            pass

    def model(self, name: str = "") -> dict[str, Any]:
        """Return the description of a model in `/v1/models`. Raises Refused.

        name: "" for the only loaded model or, if none is loaded, for the only model.
        """
        if name:
            card: dict[str, Any] = self.get(f"/v1/models/{name}")
            return card
        cards = [card for card in self.get("/v1/models")["data"] if not card["meta"]["alias_of"]]
        loaded = [card for card in cards if card["status"]["value"] == "loaded"]
        if not cards:
            raise Refused(f"the gateway at {self.url} has no model")
        if len(loaded or cards) > 1:
            names = ", ".join(card["id"] for card in loaded or cards)
            raise Refused(f"the gateway at {self.url} has several models: name one of {names}")
        return dict((loaded or cards)[0])

    def loaded(self, name: str) -> str:
        """Return the id of a model if the gateway has loaded it; otherwise "".

        name: as for `model`.
        """
        if not self.runs():
            return ""
        try:
            card = self.model(name)
        except Refused:
            return ""
        return str(card["id"]) if card["status"]["value"] == "loaded" else ""

    def streamed(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a POST request, and yield the server-sent events of the response. Raises Refused."""
        with self._sent("POST", path, body) as answer:
            for line in answer:
                data = line.removeprefix(b"data: ").rstrip()
                if line.startswith(b"data: "):
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise Refused(event["error"]["message"])
                    yield event
            raise IncompleteRead(b"")

    @contextmanager
    def _sent(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None = None
    ) -> Iterator[HTTPResponse]:
        """Send a request, and yield the response. Raises Refused, also while the block reads it.

        seconds: how long the gateway may be silent.
        """
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        connecting = seconds or _CONNECT_SECONDS
        http = _KINDS[parts.scheme](parts.hostname, parts.port, timeout=connecting)
        headers = {"Authorization": f"Bearer {self.key}".encode()} if self.key else {}
        try:
            try:
                http.connect()
            except OSError:
                raise Refused(
                    f"no gateway answers at {self.url}: start one with `mlx-backend serve MODEL`,"
                    " or name another with --url"
                ) from None
            http.sock.settimeout(seconds)
            content = None
            if body is not None:
                headers["Content-Type"] = b"application/json"
                content = json.dumps(body).encode()
            http.request(method, f"{parts.path}{quote(path)}", content, headers)
            answer = http.getresponse()
            if not 200 <= answer.status < 300:
                raise Refused(
                    _reason(answer) or f"{self.url}{path} answered with the status {answer.status}"
                )
            yield answer
        except (OSError, HTTPException, ValueError) as failure:
            lost = f"the connection to {self.url} was lost: {type(failure).__name__}"
            raise Refused(lost) from None
        finally:
            http.close()


def _reason(answer: HTTPResponse) -> str:
    """Return the message of an error; "" if the response has none."""
    try:
        error = json.loads(answer.read())["error"]
        return str(error if isinstance(error, str) else error["message"])  # Ollama's form, or ours
    except (ValueError, KeyError, TypeError):
        return ""
