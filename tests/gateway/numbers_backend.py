"""A different backend: it answers Embedding and Rerank with numbers that a test can predict.

The gateway is a host like any other, so it must serve models that our own backend does not; and a
call that blocks, or a status that our backend never sends, is easiest to script.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from tests.gateway.gateway_process import WAIT
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc

Context = grpc.ServicerContext


class NumbersBackend(backend_pb2_grpc.BackendServicer):
    """A backend without a model, which listens at `address`.

    The characters of an input beyond 1,000 are reported as truncated tokens; if the call does not
    allow that, it is refused.

    Embedding returns (length, 1, 0, 2) for a text, and the first id for token ids. For the text
    `hold`, Embedding waits until `release` is set or the call is cancelled, which sets `cancelled`;
    a stream waits likewise after its first piece. A text that names a gRPC status fails with it.
    LoadModel reports `context_size`, if it is set.
    """

    def __init__(self) -> None:
        self.hold = "hold"
        self.metadata: dict[str, str | bytes] = {}  # of the latest Embedding or Rerank
        self.context_size = ""
        self.held = threading.Semaphore(0)
        self.release = threading.Event()
        self.cancelled = threading.Semaphore(0)
        self._server = grpc.server(
            ThreadPoolExecutor(16), options=[("grpc.max_receive_message_length", -1)]
        )
        backend_pb2_grpc.add_BackendServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        self._server.start()

    def close(self) -> None:
        self.release.set()
        self._server.stop(0).wait(WAIT)

    def Health(self, _request: pb.HealthMessage, _context: Context) -> pb.Reply:
        return pb.Reply(message=b"OK")

    def LoadModel(self, _request: pb.ModelOptions, context: Context) -> pb.Result:
        if self.context_size:
            context.set_trailing_metadata((("mlx-context-size", self.context_size),))
        return pb.Result(success=True)

    def Free(self, _request: pb.HealthMessage, _context: Context) -> pb.Result:
        return pb.Result(success=True)

    def Status(self, _request: pb.HealthMessage, _context: Context) -> pb.StatusResponse:
        return pb.StatusResponse(
            state=pb.StatusResponse.READY, memory=pb.MemoryUsageData(total=4711)
        )

    def Embedding(self, request: pb.PredictOptions, context: Context) -> pb.EmbeddingResult:
        text = request.Embeddings
        if text == self.hold:
            self._hold(context)
        if text in grpc.StatusCode.__members__:
            context.abort(grpc.StatusCode[text], f"it failed with {text}")
        if request.Embeddings:
            self.metadata = dict(context.invocation_metadata())
        _truncate(context, len(text))
        first = float(len(text) or request.EmbeddingTokens[0])
        return pb.EmbeddingResult(
            embeddings=[first, 1.0, 0.0, 2.0],
            tokens=1,
            dim=4,
            prompt_tokens=len(text) or len(request.EmbeddingTokens),
            layout=(pb.EMBEDDING_LAYOUT_PER_TOKEN if text == "rows" else pb.EMBEDDING_LAYOUT_FINAL),
        )

    def _hold(self, context: Context) -> None:
        if not context.add_callback(self._ended):  # the call has ended already
            self._ended()
        self.held.release()
        self.release.wait(WAIT)

    def _ended(self) -> None:
        if not self.release.is_set():
            self.cancelled.release()
            self.release.set()

    def PredictStream(self, _request: pb.PredictOptions, context: Context) -> Iterator[pb.Reply]:
        yield pb.Reply(chat_deltas=[pb.ChatDelta(content="a")], tokens=1)
        self._hold(context)
        yield pb.Reply(chat_deltas=[pb.ChatDelta(content="b")], tokens=2, prompt_tokens=3)

    def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResult:
        self.metadata = dict(context.invocation_metadata())
        _truncate(context, max(map(len, request.documents)))
        results = [
            pb.DocumentResult(index=place, text=text, relevance_score=len(text) / 8)
            for place, text in enumerate(request.documents)
        ]
        return pb.RerankResult(
            results=results[: request.top_n or None],
            usage=pb.Usage(prompt_tokens=5, total_tokens=5),
        )


def _truncate(context: Context, length: int) -> None:
    if length <= 1000:
        return
    if dict(context.invocation_metadata()).get("mlx-truncate") == "false":
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "it is too long")
    context.set_trailing_metadata((("mlx-truncated-tokens", str(length - 1000)),))
