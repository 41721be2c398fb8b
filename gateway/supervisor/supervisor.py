"""Which models there are, and which of them have a backend now."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from gateway.errors import ApiError, of_rpc
from gateway.generation import Stub
from gateway.models.config import ModelConfig
from gateway.settings import GatewaySettings
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc

RUN = Path(__file__).parents[2] / "run.sh"


@dataclass(frozen=True, slots=True)
class Lease:
    """A loaded model that stays loaded while it is held."""

    config: ModelConfig
    stub: Stub
    identity: str  # what ModelIdentity of a request must be


class Supervisor:
    """The models, by name and alias, and the processes behind them."""

    def __init__(self, settings: GatewaySettings, models: Sequence[ModelConfig]) -> None:
        self._settings = settings
        self._models = {name: model for model in models for name in (model.name, *model.aliases)}
        self._running: dict[str, tuple[asyncio.subprocess.Process, Stub]] = {}
        self._lock = asyncio.Lock()
        self._readers: list[asyncio.Future[None]] = []

    @property
    def models(self) -> list[ModelConfig]:
        """Every model, in the order of the folder."""
        return list({id(model): model for model in self._models.values()}.values())

    def resolve(self, name: str) -> ModelConfig:
        """The model of this name or alias. Raises ApiError 404 model_not_found."""
        if name not in self._models:
            raise ApiError(
                404,
                f"the model {name!r} does not exist: GET /v1/models lists those that do",
                code="model_not_found",
                param="model",
            )
        return self._models[name]

    async def start(self) -> None:
        """Begin to watch, and load what is to be preloaded."""

    async def stop(self) -> None:
        """Wait for running requests, then end every process."""
        for child, _ in self._running.values():
            child.terminate()
            await child.wait()

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[Lease]:
        """A loaded model: waits for the load, or raises ApiError."""
        config = self.resolve(name)
        async with self._lock:
            if config.name not in self._running:
                self._running[config.name] = await self._spawn(config)
        yield Lease(config, self._running[config.name][1], config.parameters.model)

    async def _spawn(self, config: ModelConfig) -> tuple[asyncio.subprocess.Process, Stub]:
        child = await asyncio.create_subprocess_exec(
            RUN, "--addr", "127.0.0.1:0", stderr=asyncio.subprocess.PIPE
        )
        assert child.stderr is not None
        port = ""
        while line := (await child.stderr.readline()).decode():
            if match := re.search(r"event=listening addr=\S+:(\d+)", line):
                port = match[1]
                break
        self._readers.append(asyncio.ensure_future(_drop(child.stderr)))
        stub = backend_pb2_grpc.BackendStub(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        try:
            await stub.LoadModel(
                pb.ModelOptions(
                    Model=config.parameters.model,
                    ModelFile=str(self._settings.models_dir / config.parameters.model),
                    ContextSize=config.context_size,
                    Options=config.options,
                )
            )
        except grpc.aio.AioRpcError as error:
            raise of_rpc(error) from None
        return child, stub


async def _drop(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass
