"""The engine's public interface, used by the servicer. Nothing here touches MLX.

Importing this module is cheap; mlx and mlx-lm are imported by the engine thread on its first load.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from backend.engine.blas_threads import most_blas_threads
from backend.engine.commands import Cancel, Free, Load, MeasureMemory, Stop
from backend.engine.embedding.encoding import Encoded, Piece
from backend.engine.engine_state import EngineState, EngineStatus, Gauges
from backend.engine.errors import (
    InvalidRequest,
    NotLoaded,
    Overloaded,
    ShuttingDown,
    WrongKind,
)
from backend.engine.events import Finished, TokenLogprob
from backend.engine.executing.score_plan import ScoreRequest
from backend.engine.generation import Generation
from backend.engine.heartbeat import Heartbeat, StepLimits
from backend.engine.load_request import LoadRequest
from backend.engine.outbox import Publication
from backend.engine.preparing import Preparer, Work
from backend.engine.prompting.text_calls import TextCalls
from backend.engine.request import GenerationRequest
from backend.engine.served_model import ServedModel
from backend.engine.speech.transcript import Speech
from backend.engine.threads import require_threads, reserved_threads
from backend.engine.units import MIB
from backend.engine.worker import Worker
from common.field_names import named
from common.model_kind import ModelKind
from common.wording import shown

if TYPE_CHECKING:
    import numpy as np

    from backend.engine.embedding.readers import Reader
    from backend.engine.loading.stages import Stages, StageThread
    from backend.engine.model import Built
    from backend.engine.ranks.leader import Leader

_SAVE_SECONDS_AT_FREE = 3.0  # LocalAI waits 5 seconds for the answer to Free
_MEASURE_SECONDS = 1.0  # how long Status waits for the engine thread's step to end
# how long Status waits if the latest measurement is no older than _RECENT_SECONDS
_SHORT_MEASURE_SECONDS = 0.05
_RECENT_SECONDS = 5.0
_FAILED = "the engine has failed and the backend ends: send the request again in a while"
_FILES_GRACE = 1.0  # how long a cancelled load may take to end its work on files
_MOST_LEFT_BEHIND = 4
_MOST_RECORDINGS = 1024 * MIB  # bytes of samples that wait or are transcribed
_NATIVE_THREADS = 8  # threads of other libraries, and a few in reserve
_OTHER_THREADS = 4  # for work that would block the event loop for a moment
_SAVE_SECONDS = 1.0  # time to finish writing to disk when the process stops

Asked = TypeVar("Asked", bound="Reader")
Answer = TypeVar("Answer")


class Engine:
    """Owns the engine thread. All methods are called from one asyncio loop."""

    def __init__(self, leader: Leader | None = None) -> None:
        """Create the engine, with the connection to other ranks if this is rank 0 of several."""
        self._leader = leader
        self._worker = Worker(self._deliver_threadsafe, self._fatal_threadsafe)
        self._generations: dict[int, Generation] = {}
        self._preparer = Preparer(self._worker, self._generations, self._deliver_threadsafe)
        self._texts = TextCalls()
        self._files = reserved_threads(1, "files")
        self._on_files = False
        self._abandoned_loads = 0
        self._tickets = itertools.count(1)
        self._epochs = itertools.count(1)
        self._served: ServedModel | None = None
        self._abandoned = threading.Event()
        self._loading = False
        self._stopping = False
        self._measurement: asyncio.Future[dict[str, int]] | None = None
        self._memory: dict[str, int] = {}
        self._measured_at = float("-inf")
        self._slot = asyncio.Lock()
        self._before_load: Callable[[], None] = lambda: None
        self._failure: asyncio.Future[str] | None = None
        self._given_up: asyncio.Future[None] | None = None
        self._recordings = 0  # bytes of samples
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, before_load: Callable[[], None] = lambda: None) -> None:
        """Start the engine thread, without a slow import. Called on the running loop.

        before_load: called before every load.
        """
        self._before_load = before_load
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(reserved_threads(_OTHER_THREADS, "other"))
        self._failure = self._loop.create_future()
        self._given_up = self._loop.create_future()
        self._worker.start()
        if self._leader is not None:
            self._leader.open(self._fatal_threadsafe)

    async def _connect_ranks(self, request: LoadRequest) -> None:
        """Listen for the other ranks that a load names. Raises InvalidRequest."""
        hostfile = request.settings.get("hostfile", "")
        transport = request.settings.get("distributed_backend", "")
        if self._leader is not None:
            self._leader.require_named(hostfile, transport)
        elif hostfile:
            from backend.engine.ranks.leader import leader_of

            leader = leader_of(hostfile, transport)
            # On a thread, because it may wait for a name server.
            opened = asyncio.ensure_future(asyncio.to_thread(leader.open, self._fatal_threadsafe))
            try:
                await asyncio.shield(opened)
            except asyncio.CancelledError:
                opened.add_done_callback(lambda _: leader.close())
                raise
            self._leader = leader

    @property
    def heartbeat(self) -> Heartbeat:
        """The progress record that the watchdog reads."""
        return self._worker.gauges.heartbeat

    @property
    def loaded(self) -> ServedModel | None:
        """The loaded model, or None."""
        return self._served

    def require_model(self) -> ServedModel:
        """Return the model that serves; during a load, the previous. Raises NotLoaded,
        ShuttingDown.
        """
        self._refuse_when_stopping()
        if self._served is not None:
            return self._served
        if self._loading:
            raise NotLoaded("a load is in progress, try again when it is done")
        raise NotLoaded()

    def require_text_model(self, rpc: str) -> ServedModel:
        """Return the loaded model. Raises WrongKind, and what `require_model` raises."""
        served = self.require_model()
        if served.kind is not ModelKind.TEXT:
            raise _wrong_kind(rpc, served)
        return served

    def reader(self, asked: type[Asked]) -> Asked:
        """Return the loaded model's reader of this type. Raises WrongKind if it has another."""
        served = self.require_model()
        if not isinstance(served.reader, asked):
            raise _wrong_kind(asked.rpc, served)
        return served.reader

    async def load(self, request: LoadRequest) -> ServedModel:
        """Load a model. Raises ModelNotFound, ModelRejected, InvalidRequest, Overloaded.

        Loads run one after the other. If a load fails, the current model stays loaded, unless ranks
        divide the model: ranks run their steps together, so they drop the current model first.
        A request that equals the loaded model's, except for the option `adapters`, only changes the
        adapters.
        Cancelling the awaiting task cancels the load, including a download. If the load still does
        not end its work on files, its thread is abandoned.
        """
        self._refuse_when_stopping()
        async with self._slot:
            self._refuse_when_stopping()
            if self._abandoned_loads >= _MOST_LEFT_BEHIND:
                raise Overloaded(
                    f"{self._abandoned_loads} cancelled loads are still waiting for the disk: check"
                    " the disk, and restart the backend"
                )
            if "mlx.core" not in sys.modules:
                # MLX and OpenBLAS hang or end the process if they get no thread.
                require_threads(most_blas_threads() + _NATIVE_THREADS)
            self._before_load()
            if not self._only_changes_adapters(request):
                await self._connect_ranks(request)
                if self._leader is not None:
                    await self._drop_model()
            abandoned = self._abandoned = threading.Event()
            self._loading = self.heartbeat.patient = True
            loading = asyncio.ensure_future(self._load(request, abandoned))
            try:
                self._served = await asyncio.shield(loading)
            except asyncio.CancelledError:
                abandoned.set()
                self.heartbeat.patient = False
                # The engine thread may already have replaced the model: keep the new one then.
                while not loading.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait({loading}, timeout=_FILES_GRACE)
                    if self._on_files:
                        loading.cancel()
                if not loading.cancelled() and loading.exception() is None:
                    self._served = loading.result()
                raise
            finally:
                self._loading = self.heartbeat.patient = False
            self.heartbeat.limits = StepLimits(self._served.step_timeout)
            return self._served

    async def free(self) -> bool:
        """Cancel all generations and release the model; returns False if no model was loaded."""
        self._refuse_when_stopping()
        async with self._slot:
            self._refuse_when_stopping()
            return await self._drop_model()

    async def _drop_model(self) -> bool:
        """Release the model on all ranks, even if the awaiting task is cancelled meanwhile."""
        drop = asyncio.ensure_future(self._drop())
        try:
            return await asyncio.shield(drop)
        except asyncio.CancelledError:
            await asyncio.wait({drop})
            raise

    async def _drop(self) -> bool:
        served, self._served = self._served, None
        command = Free()
        self._worker.send(command)
        await self._answered(command.done)
        if served is not None and served.disk is not None:
            await asyncio.to_thread(served.disk.close, _SAVE_SECONDS_AT_FREE)
        if self._leader is not None:
            self._leader.drop()
        return served is not None

    def refuse_when_full(self) -> None:
        """Raise Overloaded if the loaded model's queue is full; does nothing without a model."""
        served = self._served
        if served is not None and len(self._generations) >= served.capacity:
            raise Overloaded(
                f"the queue is full: {len(self._generations)} requests are running or waiting;"
                " try again later, or load the model with a larger max_queue"
            )

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request; returns immediately. Raises NotLoaded, Overloaded, ShuttingDown."""
        self.require_text_model("Predict")
        return self._queue(partial(self._preparer.generation, request))

    async def encode(self, read: Callable[[], list[Piece]], characters: int = 0) -> Encoded:
        """Run the loaded model on the rows that `read` returns on a prompt thread.

        Cancelling the caller cancels the request.
        characters: the length of all texts, which decides on which prompt thread.
        Raises what `read` raises, Overloaded, NotLoaded.
        """
        work = partial(self._preparer.encoding, read, characters)
        return await self._queue(work).last(Encoded)

    async def score(self, request: ScoreRequest) -> tuple[tuple[TokenLogprob, ...], ...]:
        """Return each candidate's tokens with their natural log-probabilities after the prompt.

        Cancelling the caller cancels the request. Raises what `submit` and its generation raise.
        """
        self.require_text_model("Score")
        finished = await self._queue(partial(self._preparer.score, request)).last(Finished)
        return finished.scores

    @contextlib.asynccontextmanager
    async def recording(self, recording: str) -> AsyncIterator[np.ndarray]:
        """Decode a recording to samples: one channel at AUDIO_RATE per second.

        The samples are counted until the context ends. Cancelling the caller cancels the request.
        recording: a path, base64 or a data URI.
        Raises InvalidRequest, Overloaded, NotLoaded.
        """
        answer = self._queue(partial(self._preparer.recording, recording))
        samples = (await answer.last(Encoded)).outputs[0]
        kept, size = self._recordings, samples.nbytes
        if kept and kept + size > _MOST_RECORDINGS:
            raise Overloaded(
                f"the recordings of other requests take {kept // MIB} MiB: send this one again when"
                " they are done"
            )
        self._recordings += size
        try:
            yield samples
        finally:
            self._recordings -= size

    def transcribe(self, speech: Speech) -> Generation:
        """Queue a recording; its events are `Transcribed`, then `Finished`.

        Raises WrongKind, NotLoaded, Overloaded, ShuttingDown.
        """
        served = self.require_model()
        if served.speech is None:
            raise _wrong_kind("AudioTranscription", served)
        return self._queue(partial(self._preparer.speech, speech))

    def _queue(self, work: Work) -> Generation:
        served = self.require_model()
        self.refuse_when_full()
        ticket = next(self._tickets)
        owner = Generation(lambda: self._cancel(ticket))
        self._generations[ticket] = owner
        self._preparer.start(work, served, ticket)
        return owner

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text. Special tokens are recognised, but none is added."""
        builder = self.require_model().prompts
        return await self._texts.run(builder.tokenize, text)

    async def detokenize(self, tokens: list[int]) -> str:
        """Return the text of token ids. Raises InvalidRequest for an id outside the vocabulary."""
        builder = self.require_model().prompts
        return await self._texts.run(builder.detokenize, tokens)

    async def status(self) -> EngineStatus:
        """Return the state and the memory. The total is all memory that MLX has allocated.

        The engine thread measures memory after the current step. If the step takes long, the
        previous measurement is returned; if that is recent, it is returned after a shorter wait.
        """
        state = self._state()
        if state is not EngineState.FAILED:
            if self._measurement is None or self._measurement.done():
                self._measurement = self._begin_measurement()
            recent = time.monotonic() - self._measured_at <= _RECENT_SECONDS
            short = recent and state is EngineState.GENERATING
            seconds = _SHORT_MEASURE_SECONDS if short else _MEASURE_SECONDS
            await asyncio.wait({self._measurement}, timeout=seconds)
        memory = dict(self._memory)
        total = memory.get("mlx_active", 0) + memory.get("mlx_cache", 0)
        if self._served is not None:
            memory["weights"] = self._served.weights_bytes - memory.get("expert_cache", 0)
        ranks = self._leader.report() if self._leader is not None else ()
        return EngineStatus(state, total, memory, ranks)

    def _begin_measurement(self) -> asyncio.Future[dict[str, int]]:
        def remember(measured: asyncio.Future[dict[str, int]]) -> None:
            if not measured.cancelled() and measured.exception() is None:
                self._memory, self._measured_at = measured.result(), time.monotonic()

        command = MeasureMemory()
        self._worker.send(command)
        measurement = asyncio.wrap_future(command.done)
        measurement.add_done_callback(remember)
        return measurement

    def metrics(self) -> Gauges:
        """Return the totals since the start. Requests that are being prepared count as queued."""
        gauges = self._worker.gauges
        gauges.queued = max(len(self._generations) - gauges.running, 0)
        return gauges

    async def stop(self, grace: float) -> None:
        """Refuse new work, cancel running work and end the thread, within `grace` seconds."""
        self._stopping = True
        self._abandoned.set()
        self._worker.send(Stop())
        self._preparer.stop()
        self._texts.stop()
        self._files.shutdown(wait=False, cancel_futures=True)
        failed = self._state() is EngineState.FAILED
        for ticket in list(self._generations):
            self._deliver([(ticket, ShuttingDown(_FAILED) if failed else ShuttingDown())])
        if failed and self._given_up is not None and not self._given_up.done():
            self._given_up.set_result(None)
        started = time.monotonic()
        await asyncio.to_thread(self._worker.join, grace)
        if self._leader is not None:
            self._leader.close()
        if self._served is not None and self._served.constraints is not None:
            self._served.constraints.close()
        if self._served is not None and self._served.disk is not None:
            left = grace - (time.monotonic() - started)
            await asyncio.to_thread(self._served.disk.close, min(max(left, 0.0), _SAVE_SECONDS))

    async def failed(self) -> str:
        """Wait until the engine has failed; returns the cause.

        Running calls end only in `stop`, so that health checks can report the failure first.
        """
        assert self._failure is not None, "start() comes first"
        return await asyncio.shield(self._failure)

    def _only_changes_adapters(self, request: LoadRequest) -> bool:
        """Return whether a load request only changes the adapters of the loaded model.

        Raises InvalidRequest if ranks divide that model.
        """
        loaded = None if self._served is None else self._served.request
        if loaded is None or loaded.choices == request.choices:
            return False
        same = loaded.without_choices() == request.without_choices()
        if same and self._leader is not None:
            raise InvalidRequest(
                "option adapters is set, but adapters are not applied where ranks divide the model:"
                " leave it out, or serve it with one rank"
            )
        return same

    async def _load(self, request: LoadRequest, abandoned: threading.Event) -> ServedModel:
        from backend.engine.loading.loader import change_adapters, load

        assert self._loop is not None
        served, worker = self._served, self._worker
        stages: Stages[Built | ServedModel]
        if served is not None and self._only_changes_adapters(request):
            stages = change_adapters(request, served, lambda: worker.scheduler, abandoned)
        else:
            stages = load(request, next(self._epochs), abandoned, self._leader)
        at: StageThread | ServedModel = "files"
        while isinstance(at, str):
            if at == "files" and not abandoned.is_set():
                at = await self._with_files(stages, abandoned)
            else:
                self._refuse_when_stopping()
                command = Load(stages, abandoned)
                self._worker.send(command)
                at = await self._answered(command.done)
        return at

    async def _with_files(self, stages: Stages[Any], abandoned: threading.Event) -> StageThread:
        """Run a stage on the file thread; a load that is cancelled abandons stage and thread."""
        stage = self._files.submit(next, stages)
        self._on_files = True
        try:
            return await asyncio.wrap_future(stage)
        except asyncio.CancelledError:
            self._files.shutdown(wait=False)
            self._files = ThreadPoolExecutor(1, thread_name_prefix="files")
            self._abandoned_loads += 1
            stage.add_done_callback(lambda _: self._returned(stages, abandoned))
            raise
        finally:
            self._on_files = False

    def _returned(self, stages: Stages[Any], abandoned: threading.Event) -> None:
        """Release the weights that an abandoned stage has read, once the stage has ended."""
        assert self._loop is not None
        self._worker.send(Load(stages, abandoned))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._forget_abandoned)

    def _forget_abandoned(self) -> None:
        self._abandoned_loads -= 1

    async def _answered(self, done: concurrent.futures.Future[Answer]) -> Answer:
        """Wait for the engine thread's answer; cancelling the wait does not cancel the command.

        Raises ShuttingDown if the thread will not answer any more.
        """
        assert self._given_up is not None, "start() comes first"
        answer = asyncio.wrap_future(done)
        ends: list[asyncio.Future[Any]] = [answer, self._given_up]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ShuttingDown(_FAILED)
        return answer.result()

    def _refuse_when_stopping(self) -> None:
        if self._state() is EngineState.FAILED:
            raise ShuttingDown(_FAILED)
        if self._stopping:
            raise ShuttingDown()

    def _state(self) -> EngineState:
        if self._failure is not None and self._failure.done():
            return EngineState.FAILED
        if self._loading:
            return EngineState.LOADING
        if self._served is None:
            return EngineState.EMPTY
        return EngineState.GENERATING if self._generations else EngineState.READY

    def _cancel(self, ticket: int) -> None:
        if self._generations.pop(ticket, None) is not None:
            self._worker.send(Cancel(ticket))

    def _deliver_threadsafe(self, publications: list[Publication]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, publications)

    def _deliver(self, publications: list[Publication]) -> None:
        for ticket, what in publications:
            if (owner := self._generations.get(ticket)) is not None:
                owner.push(what)
                if owner.over:
                    del self._generations[ticket]

    def _fatal_threadsafe(self, cause: str) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.fail, cause)

    def fail(self, cause: str) -> None:
        """Mark the engine as failed. If it has failed before, the first cause stays."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(cause)


def _wrong_kind(rpc: str, served: ServedModel) -> WrongKind:
    divided = " and is divided among ranks" if served.division else ""
    return WrongKind(
        f"{named(rpc)} is not served: the loaded model {shown(served.public_name)}"
        f" {served.kind.words}"
        f"{divided}"
    )
