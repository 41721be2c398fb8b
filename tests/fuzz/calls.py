"""Every RPC from request bytes to reply bytes, on an engine without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import grpc
import numpy as np

from backend.engine.embedding.encoding import Encoded, Piece
from backend.engine.embedding.label_reader import LabelReader
from backend.engine.embedding.readers import Limits, PairReader, TextReader
from backend.engine.engine import Asked
from backend.engine.errors import InvalidRequest
from backend.engine.events import TokenLogprob
from backend.engine.executing.score_plan import ScoreRequest
from backend.rpc.interceptors import CallInterceptor
from backend.rpc.last_load import LastLoad
from backend.rpc.servicer import Servicer
from tests.common.grammar_walks import byte_tokenizer
from tests.fuzz.messages import fill
from tests.rpc.fake_engine import SERVED, FakeEngine
from wire import backend_pb2_grpc

LIMITS = Limits(context=64, vocabulary=257)
_SHAPES: dict[str, tuple[int, ...]] = {"Rerank": (), "Embedding": (4,)}
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


class Refused(Exception):
    """The call ended with a status."""


class _Context:
    """The parts of a call's context that the servicer uses."""

    def __init__(self, message: bytes, written: Callable[[Any], bytes]) -> None:
        self._message, self._written = message, written

    async def read(self) -> bytes:
        return self._message

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Do nothing."""

    async def abort(self, code: grpc.StatusCode, sentence: str, trailers: Any = ()) -> None:
        assert code is not grpc.StatusCode.INTERNAL, sentence
        assert sentence
        assert all(key.endswith("-bin") or value.isascii() for key, value in trailers)
        raise Refused

    async def write(self, reply: Any) -> None:
        self._written(reply)

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_trailing_metadata(self, trailers: Any) -> None:
        dict(trailers)


class _Engine(FakeEngine):
    """Reads all fields of a request, and answers with meaningless numbers."""

    def __init__(self, shape_of: Callable[[Piece], tuple[int, ...]]) -> None:
        super().__init__(SERVED)
        self.shape_of = shape_of

    def reader(self, asked: type[Asked]) -> Asked:
        return cast(Asked, _readers()[asked])

    async def encode(self, read: Callable[[], list[Piece]], _: int = 0) -> Encoded:
        return Encoded(tuple(np.full(self.shape_of(piece), 0.2, np.float32) for piece in read()))

    async def detokenize(self, tokens: list[int]) -> str:
        if not all(0 <= token < LIMITS.vocabulary - 1 for token in tokens):
            raise InvalidRequest("there is no such token")
        return bytes(tokens).decode(errors="replace")

    async def score(self, request: ScoreRequest) -> tuple[tuple[TokenLogprob, ...], ...]:
        return tuple(
            tuple(TokenLogprob(byte, -1.0) for byte in text.encode()) for text in request.candidates
        )


class _Methods:
    """Replaces a server, and stores the methods that the service registers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, _: Any) -> None: ...

    def add_registered_method_handlers(self, _: str, handlers: dict[str, Any]) -> None:
        self.handlers = handlers


def call(given: bytes) -> None:
    """The first byte chooses the RPC; the rest is its message (`messages.fill`)."""
    if given:
        _runner().run(_call(given[0], given[1:]))


async def _call(number: int, given: bytes) -> None:
    def shape_of(piece: Piece) -> tuple[int, ...]:
        return _SHAPES.get(method, (len(piece.ids), len(LABELS)))

    last_load, methods = LastLoad({}), _Methods()
    servicer = Servicer(_Engine(shape_of), last_load)
    backend_pb2_grpc.add_BackendServicer_to_server(servicer, methods)
    method, handler = sorted(methods.handlers.items())[number % len(methods.handlers)]

    async def found(_: Any) -> Any:
        return handler

    details: Any = _Details(f"/backend.Backend/{method}")
    guarded: Any = await CallInterceptor(last_load, lambda: None).intercept_service(found, details)
    message = handler.request_deserializer.__self__()
    fill(message, given)
    written = guarded.response_serializer
    try:
        behaviour = guarded.stream_stream or guarded.stream_unary
        reply = await behaviour(None, _Context(message.SerializeToString(), written))
    except Refused:
        return
    if reply is not None:
        written(reply)


class _Details:
    invocation_metadata = ()

    def __init__(self, method: str) -> None:
        self.method = method


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


@cache
def _readers() -> dict[type[Any], Any]:
    def ids(*texts: str) -> list[int]:
        return list("".join(texts).encode())

    def piece(prompt: str, text: str, _: int | None = None) -> Piece:
        return Piece(ids(prompt, text))

    tokenizer = byte_tokenizer().backend_tokenizer
    labels = LabelReader(tokenizer, LIMITS, LABELS, lambda shares: list(shares.argmax(axis=1)))
    return {
        TextReader: TextReader(piece, LIMITS),
        PairReader: PairReader(lambda _: piece, LIMITS),
        LabelReader: labels,
    }
