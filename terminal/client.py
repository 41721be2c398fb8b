"""The gateway's HTTP API, as far as a conversation needs it."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

_UNREACHABLE = "the gateway cannot be reached: is it still running?"
_BROKEN = "the answer broke off: the connection was closed before it was complete"


class ChatFailed(Exception):
    """What went wrong, in one sentence for a person."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Part of a tool call: id and name once, arguments (JSON text) in pieces."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of an answer; `tokens` of the whole answer comes with the last one."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    finish_reason: str | None = None
    tokens: int | None = None


class Client:
    """One gateway. Every method raises ChatFailed."""

    def __init__(self, url: str, key: str = "") -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # A prompt may be read for minutes; the gateway's keepalives come far more often.
        timeout = httpx.Timeout(120.0, connect=5.0)
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        self._http.close()

    def answers(self) -> bool:
        """Whether a gateway is there."""
        try:
            return self._http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def models(self) -> list[str]:
        """The names that may be asked for."""
        try:
            response = self._http.get("/v1/models")
        except httpx.HTTPError:
            raise ChatFailed(_UNREACHABLE) from None
        if response.status_code != 200:
            raise _refusal(response)
        return [str(model["id"]) for model in response.json()["data"]]

    def chat(self, body: dict[str, Any]) -> Generator[Piece, None, None]:
        """The pieces of a streamed answer. Leaving the iterator ends the answer in the backend."""
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=asked) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response)
                yield from _pieces(response.iter_lines())
        except httpx.ConnectError:
            raise ChatFailed(_UNREACHABLE) from None
        except httpx.HTTPError:
            raise ChatFailed(_BROKEN) from None


def _pieces(lines: Iterator[str]) -> Iterator[Piece]:
    for line in lines:
        if not line.startswith("data:"):
            continue  # a keepalive comment, or the empty line after an event
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise ChatFailed(str(chunk["error"].get("message", _BROKEN)))
        yield _piece(chunk)
    raise ChatFailed(_BROKEN)


def _piece(chunk: dict[str, Any]) -> Piece:
    usage = chunk.get("usage") or {}
    choice = (chunk.get("choices") or [{}])[0]
    delta = choice.get("delta") or {}
    calls = tuple(
        CallPiece(
            call["index"],
            call.get("id") or "",
            call["function"].get("name") or "",
            call["function"].get("arguments") or "",
        )
        for call in delta.get("tool_calls") or ()
    )
    return Piece(
        delta.get("content") or "",
        delta.get("reasoning_content") or "",
        calls,
        choice.get("finish_reason"),
        usage.get("completion_tokens"),
    )


def _refusal(response: httpx.Response) -> ChatFailed:
    if response.status_code == 401:
        return ChatFailed("the gateway asks for an API key: put it into MLX_GATEWAY_API_KEY")
    try:
        return ChatFailed(str(response.json()["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return ChatFailed(f"the gateway answered with HTTP status {response.status_code}")
