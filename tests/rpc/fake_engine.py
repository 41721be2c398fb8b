"""A scripted engine: these tests are about the wire, not about the model.

It behaves as the engine's interface promises and does nothing more. A script says what the next
generations yield and where they pause; events tell the test that a point was reached, so no test
sleeps.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from backend.engine.engine import Asked, Engine
from backend.engine.engine_state import (
    DraftReport,
    EngineState,
    EngineStatus,
    ExpertCounts,
    Gauges,
)
from backend.engine.errors import Cancelled, NotLoaded, Overloaded, ShuttingDown, WrongKind
from backend.engine.events import Event, Finished, FinishReason, Progress, TextDelta, Usage
from backend.engine.generation import Generation
from backend.engine.heartbeat import Heartbeat, StepTimeout
from backend.engine.load_request import LoadRequest
from backend.engine.prompting.prompts import PromptBuilder
from backend.engine.request import GenerationRequest
from backend.engine.served_model import ServedModel
from backend.engine.token_text import ByteStream
from common.chat_format import ChatFormat

CHAT = ChatFormat.named("hermes", "qwen3")
WRITTEN = [b"%d" % token for token in range(512)]
SERVED = ServedModel(
    name="tiny",
    model_type="qwen3",
    context_size=2048,
    chat_template="{{ messages }}",
    chat_format=CHAT,
    rendered_template="<rendered>",
    vocabulary_size=512,
    token_bytes=WRITTEN.__getitem__,
    new_text=lambda continues: ByteStream(WRITTEN.__getitem__, strip_first_space=not continues),
    prompts=cast(PromptBuilder, None),
    capacity=1,
    step_timeout=StepTimeout(0, 0),
    weights_bytes=0,
    epoch=1,
)


@dataclass
class Script:
    """One generation: pieces, then an error or the end; `hold` makes it wait after them."""

    pieces: Sequence[str] = ("Hel", "lo")
    error: Exception | None = None
    hold: bool = False
    reason: FinishReason = "stop"
    progress: Sequence[int] = ()


class FakeGeneration(Generation):
    """Yields what the script says, piece by piece."""

    def __init__(self, engine: FakeEngine, script: Script) -> None:
        super().__init__(lambda: None)
        self._engine = engine
        self._script = script
        self._stopped = asyncio.Event()

    def cancel(self) -> None:
        self._stopped.set()

    async def __aenter__(self) -> FakeGeneration:
        self._engine.running.append(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.running.remove(self)
        self._engine.left.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        usage = Usage(prompt_tokens=7, cached_tokens=3, prefill_ms=1.5)
        for processed in self._script.progress:
            yield Progress(Usage(prompt_tokens=7), processed)
        for count, piece in enumerate(self._script.pieces, 1):
            usage = Usage(7, 3, count, 1.5, count * 2.0)
            yield TextDelta(piece, usage)
        if self._script.hold:
            self._engine.holding.set()
            await self._stopped.wait()
            raise Cancelled("the backend is shutting down")
        if self._script.error:
            raise self._script.error
        yield Finished(self._script.reason, usage)


class FakeEngine(Engine):
    """One scripted model slot. The threading events are for the test's own thread."""

    def __init__(self, served: ServedModel | None = SERVED) -> None:
        self._heartbeat = Heartbeat.fresh()
        self.served = served
        self.script = Script()
        self.fault: Exception | None = None
        self.load_fault: BaseException | None = None
        self.hold_load = False
        self.requests: list[GenerationRequest] = []
        self.loads: list[LoadRequest] = []
        self.running: list[FakeGeneration] = []
        self.holding = threading.Event()
        self.left = threading.Event()
        self.full: Overloaded | None = None
        self.state = EngineState.READY
        self.ranks: tuple[str, ...] = ()
        self.stopping = False
        self.drafting: DraftReport | None = None
        self.experts: ExpertCounts | None = None

    def start(self, before_load: Callable[[], None] = lambda: None) -> None: ...

    @property
    def heartbeat(self) -> Heartbeat:
        return self._heartbeat

    @property
    def loaded(self) -> ServedModel | None:
        return self.served

    def require_model(self) -> ServedModel:
        if self.served is None:
            raise NotLoaded
        return self.served

    def reader(self, asked: type[Asked]) -> Asked:
        self.require_model()
        raise WrongKind(f"{asked.rpc} is not served: the model does what a script says")

    async def load(self, request: LoadRequest) -> ServedModel:
        self.loads.append(request)
        if self.load_fault:
            raise self.load_fault
        self.served = replace(SERVED, epoch=SERVED.epoch + len(self.loads))
        if self.hold_load:
            self.holding.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        return self.served

    async def free(self) -> bool:
        had, self.served = self.served is not None, None
        return had

    def refuse_when_full(self) -> None:
        if self.full:
            raise self.full

    def submit(self, request: GenerationRequest) -> Generation:
        if self.stopping:
            raise ShuttingDown
        if self.fault:
            raise self.fault
        self.requests.append(request)
        return FakeGeneration(self, self.script)

    async def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    async def detokenize(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    async def status(self) -> EngineStatus:
        return EngineStatus(self.state, 300, {"weights": 200, "cache": 100}, self.ranks)

    def metrics(self) -> Gauges:
        return Gauges(2**40, 12, 34.5, drafting=self.drafting, experts=self.experts)

    async def stop(self, grace: float) -> None:
        self.stopping = True
        for generation in self.running:
            generation.cancel()

    async def failed(self) -> str:
        cause: str = await asyncio.get_running_loop().create_future()
        return cause
