"""Calls a running gateway, and turns its errors into messages for the user."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
import httpx

DEFAULT_URL = "http://127.0.0.1:8080"
_TIMEOUT = httpx.Timeout(10.0, read=None)


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
            if httpx.URL(self.url).scheme in ("http", "https"):
                return
        except httpx.InvalidURL:
            pass
        raise click.UsageError(f"--url is {self.url!r}: give one such as {DEFAULT_URL}")

    def runs(self) -> bool:
        """Return whether a gateway answers at the address."""
        try:
            with self._http() as http:
                return http.get("/health", timeout=5.0).is_success
        except httpx.HTTPError:
            return False

    def get(self, path: str) -> Any:
        """Send a GET request, and return the JSON of the response. Raises Refused."""
        return self._json("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a POST request, and return the JSON of the response. Raises Refused."""
        return self._json("POST", path, body)

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
        try:
            with self._http() as http, http.stream("POST", path, json=body) as answer:
                if not answer.is_success:
                    answer.read()
                    raise Refused(_reason(answer))
                for line in answer.iter_lines():
                    data = line.removeprefix("data: ")
                    if line != data and data != "[DONE]":
                        event = json.loads(data)
                        if "error" in event:
                            raise Refused(event["error"]["message"])
                        yield event
        except httpx.HTTPError as failure:
            raise self._gone(failure) from None

    def _json(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            with self._http() as http:
                answer = http.request(method, path, json=body)
        except httpx.HTTPError as failure:
            raise self._gone(failure) from None
        if not answer.is_success:
            raise Refused(_reason(answer))
        return answer.json()

    def _http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT, trust_env=False)

    def _gone(self, failure: httpx.HTTPError) -> Refused:
        if isinstance(failure, httpx.ConnectError):
            return Refused(
                f"no gateway answers at {self.url}: start one with `mlx-backend serve MODEL`, or"
                " name another with --url"
            )
        return Refused(f"the connection to {self.url} was lost: {type(failure).__name__}")


def _reason(answer: httpx.Response) -> str:
    try:
        error = answer.json()["error"]
        return str(error if isinstance(error, str) else error["message"])  # Ollama's form, or ours
    except (ValueError, KeyError, TypeError):
        return f"{answer.url} answered with the status {answer.status_code}"
