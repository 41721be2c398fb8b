"""The work between a request and its first piece: one call of the backend, and no thread."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import grpc
import httpx
import pytest

from gateway.app import create_app
from gateway.exchange import Traffic
from gateway.models.reading import read_folder
from gateway.settings import GatewaySettings
from gateway.supervisor import instance
from gateway.supervisor.supervisor import Supervisor
from tests.gateway.supervising import write
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc


class Counting(backend_pb2_grpc.BackendServicer):
    """Answers immediately, and records which methods were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def Health(self, request: Any, context: Any) -> pb.Reply:
        self.calls.append("Health")
        return pb.Reply(message=b"OK")

    async def LoadModel(self, request: Any, context: Any) -> pb.Result:
        self.calls.append("LoadModel")
        return pb.Result(success=True)

    async def Status(self, request: Any, context: Any) -> pb.StatusResponse:
        self.calls.append("Status")
        return pb.StatusResponse()

    async def Free(self, request: Any, context: Any) -> pb.Result:
        return pb.Result(success=True)

    async def PredictStream(self, request: Any, context: Any) -> AsyncIterator[pb.Reply]:
        self.calls.append("PredictStream")
        yield pb.Reply(tokens=1, prompt_tokens=2, chat_deltas=[pb.ChatDelta(content="Paris")])


@pytest.fixture
async def backend() -> AsyncIterator[tuple[Counting, str]]:
    servicer, server = Counting(), grpc.aio.server()
    backend_pb2_grpc.add_BackendServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def client(
    backend: tuple[Counting, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(instance, "_POLL", 3600.0)  # the watchdog calls Health and Status too
    write(tmp_path, "m", {"address": backend[1], "parameters": {"model": "owner/m"}})
    settings = GatewaySettings(tmp_path, max_memory_bytes=0, forget_prompts=True)
    app = create_app(settings, Supervisor(settings, read_folder(tmp_path)), Traffic())
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


SAID = [{"role": "user", "content": "Where?"}]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": SAID}),
        ("/v1/completions", {"prompt": "Where?"}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 9}),
        ("/v1/responses", {"input": "Where?"}),
        ("/api/chat", {"messages": SAID}),
    ],
)
async def test_an_answer_of_a_loaded_model_needs_one_call_and_no_thread(
    client: httpx.AsyncClient,
    backend: tuple[Counting, str],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    asked = {"model": "m", "stream": stream, **body}
    assert "Paris" in (await client.post(path, json=asked)).text  # which loads the model
    backend[0].calls.clear()
    hops: list[object] = []
    run = anyio.to_thread.run_sync

    async def counted(work: Any, *arguments: Any, **options: Any) -> Any:
        hops.append(work)
        return await run(work, *arguments, **options)

    monkeypatch.setattr(anyio.to_thread, "run_sync", counted)
    answer = await client.post(path, json=asked)
    assert "Paris" in answer.text, json.dumps(asked)
    assert backend[0].calls == ["PredictStream"]
    assert hops == []
