"""One model's states: stopped, starting, loading, ready, stopping, and stopped again.

All changes of state happen here, on the event loop, without an await between a check and the action
that depends on it. At most one task at a time works on a model; requests only wait for it, so a
client that disconnects ends only its own wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from common.field_names import MODEL_KEYS, in_snake_case
from gateway.errors import ApiError
from gateway.models.config import OWN_BACKENDS, ModelConfig
from gateway.settings import GatewaySettings
from gateway.supervisor import policy
from gateway.supervisor.backend import Backend
from gateway.supervisor.failures import LoadFailed, load_failed
from wire import backend_pb2 as pb

# By field of ModelOptions: the key of a model file that has its value.
_KEYS = {
    field.name: key
    for field in pb.ModelOptions.DESCRIPTOR.fields
    if (key := MODEL_KEYS.get(field.name) or in_snake_case(field.name)) in ModelConfig.model_fields
}
_POLL = 3.0  # seconds between two checks of a ready backend
_HEALTH_LIMIT = 10.0
_STATUS_LIMIT = 5.0
_MISSES = 3  # Health calls in a row without an answer, after which the process is killed
_log = logging.getLogger("gateway.supervisor")


def load_request(config: ModelConfig, models_dir: Path, draft: str = "") -> pb.ModelOptions:
    """Return the LoadModel request of a model, with one of its `draft_models` if `draft` is set."""
    draft_model = draft or config.draft_model
    own = [f"n_draft:{config.n_draft}"] if config.n_draft else []
    if config.adapters:
        own.append(f"adapters:{', '.join(map('='.join, config.adapters.items()))}")
    fields: dict[str, Any] = {name: getattr(config, key) for name, key in _KEYS.items()}
    fields |= {
        "Model": config.parameters.model,
        "ModelFile": str(models_dir / config.parameters.model),
        "ModelPath": str(models_dir),
        # The last option of a key counts, so the file's own options come last.
        "Options": [*own, *config.options],
        "EngineArgs": json.dumps(config.engine_args) if config.engine_args else "",
        "DraftModel": _local(models_dir, draft_model),
        "Tokenizer": config.parameters.tokenizer,
        "RopeFreqBase": config.parameters.rope_freq_base,
        "RopeFreqScale": config.parameters.rope_freq_scale,
    }
    return pb.ModelOptions(**fields)


def _local(models_dir: Path, reference: str) -> str:
    """Return a folder under the models folder as a path; anything else unchanged."""
    folder = models_dir / reference
    return str(folder) if reference and folder.exists() else reference


class State(StrEnum):
    """The state of a model.

    FAILED is tried again by the next request, BACKING_OFF only after its pause. BROKEN has an
    invalid file.
    """

    STOPPED = "stopped"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"
    BACKING_OFF = "backing off"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The state of one model. `error` may contain paths: clients do not get them."""

    name: str
    state: State
    pid: int | None = None  # the process, if the gateway has started it
    port: int | None = None
    memory_bytes: int = 0
    download: tuple[int, int] | None = None  # MiB already downloaded, and in all, during a download
    leases: int = 0  # requests that use the model, or wait for it
    restarts: int = 0  # after crashes
    error: str = ""  # the last failure; empty after a successful load
    leaves_at: float | None = None  # seconds since the epoch, if no request comes; None: never


@dataclass(frozen=True, slots=True)
class Key:
    """What is loaded: a model, with the draft model that a request chose."""

    name: str
    draft: str = ""

    def __str__(self) -> str:
        return "+".join(part for part in (self.name, self.draft) if part)


class ModelInstance:
    """One model's state. Only this class changes it."""

    def __init__(self, key: Key, config: ModelConfig, settings: GatewaySettings) -> None:
        self.key = key
        self.config = config
        self.leases = 0
        self.last_used = time.monotonic()
        self.failures = policy.Failures()
        self.memory = 0  # bytes
        self.context_size = 0  # tokens; 0 before the first load, or if it is unknown
        self.context_reason = ""  # why it is shorter than the model's own
        self.warm = True  # whether its warm prompts need not be read
        self.backend: Backend | None = None
        self.state = State.STOPPED
        self.work: asyncio.Future[ApiError | None] | None = None
        self._settings = settings
        self._watch: asyncio.Future[None] | None = None
        self._leaving: set[asyncio.Future[None]] = set()  # running tasks that end lost backends
        self._ready_at = 0.0
        self._restarts = 0

    @property
    def working(self) -> bool:
        return self.work is not None and not self.work.done()

    @property
    def occupied(self) -> bool:
        """Whether the model has a backend, or is getting one."""
        return self.state in (State.STARTING, State.LOADING, State.READY)

    @property
    def at_rest(self) -> bool:
        """Whether the instance can be removed: it has no process and no recent failure."""
        failed = policy.remembered(self.failures, self.last_used, time.monotonic())
        return self.state is State.STOPPED and not (self.working or self._leaving or failed)

    def status(self) -> ModelStatus:
        process = self.backend.process if self.backend else None
        loading = self.state in (State.STARTING, State.LOADING)
        state = self.state
        if state is State.STOPPED and self.failures.count:
            waits = self.failures.retry_at > time.monotonic()
            state = State.BACKING_OFF if waits else State.FAILED
        return ModelStatus(
            str(self.key),
            state,
            process.pid if process else None,
            process.port if process else None,
            self.memory,
            process.download if process and loading else None,
            self.leases,
            self._restarts,
            self.failures.sentence,
        )

    def begin_load(self, after: Sequence[asyncio.Future[ApiError | None]]) -> None:
        """Start a backend and load the model.

        after: tasks to wait for first.
        """
        assert not self.working
        self.state = State.STARTING
        self.work = asyncio.ensure_future(self._load(after))

    def _request(self, config: ModelConfig) -> pb.ModelOptions:
        return load_request(config, self._settings.folder, self.key.draft)

    async def change_adapters(self, config: ModelConfig) -> None:
        """Give a loaded model other adapters, with which it is also loaded later.

        Raises LoadFailed, after which nothing has changed. The caller has a lease.

        config: differs from the current one only in the adapters.
        """
        if self.working:
            await self.settled()
        if self.backend is not None and self._request(config) != self._request(self.config):
            await self.backend.load(self._request(config))
        self.config = config

    def begin_unload(self, reason: str) -> None:
        assert self.state is State.READY
        _log.info("%s: unloading (%s)", self.key, reason)
        self.state = State.STOPPING
        self.work = asyncio.ensure_future(self._unload(free=True))

    async def settled(self) -> ApiError | None:
        """Wait for a running load or unload. Returns the load's error, if any."""
        work = self.work
        assert work is not None
        await asyncio.wait((work,))
        return None if work.cancelled() else work.result()

    async def usable(self) -> bool:
        """Return whether a request may be sent now.

        A backend whose process has just died, or that is not connected, is checked first, because
        the gateway may not have been notified yet.
        """
        backend = self.backend
        if self.state is not State.READY or backend is None:
            return False
        if backend.alive:
            return True
        if await backend.answers(_HEALTH_LIMIT):
            return self.backend is backend and self.state is State.READY
        self._lost(backend, await backend.end())
        return False

    async def shut(self) -> None:
        """Cancel a running load or unload and end the process, because the gateway ends."""
        if self.work is not None and not self.work.done():
            if self.state is not State.STOPPING:
                self.work.cancel()
            await asyncio.wait((self.work,))
        if self.backend is not None:
            self.state = State.STOPPING
            await self._unload(free=False)
        if self._leaving:
            await asyncio.wait(self._leaving)

    async def _load(self, after: Sequence[asyncio.Future[ApiError | None]]) -> ApiError | None:
        started = time.monotonic()
        try:
            if after:
                await asyncio.wait(after)
            await self._within_limit(self._start())
        except LoadFailed as problem:
            return self._load_failed(str(problem))
        except TimeoutError:
            return self._load_failed(f"it took longer than {self._settings.load_timeout:.0f} s")
        except BaseException:
            self.state = State.STOPPED
            raise
        _log.info("%s: ready after %.1f s", self.key, time.monotonic() - started)
        return None

    async def _within_limit(self, start: Coroutine[Any, Any, None]) -> None:
        """Run the start. Raises TimeoutError after the limit, unless a download is progressing."""
        work = asyncio.ensure_future(start)
        fetched = None
        try:
            while True:
                await asyncio.wait((work,), timeout=self._settings.load_timeout or None)
                if work.done():
                    return work.result()
                process = self.backend.process if self.backend else None
                before, fetched = fetched, process.download if process else None
                if before == fetched:
                    raise TimeoutError
        finally:
            work.cancel()
            await asyncio.wait((work,))

    async def _start(self) -> None:
        _log.info("%s: starting a backend", self.key)
        backend = await Backend.start(self.config, str(self.key))
        self.backend = backend
        try:
            self.state = State.LOADING
            _log.info("%s: loading %s", self.key, self.config.parameters.model)
            request = self._request(self.config)
            self.context_size, self.context_reason = await backend.load(request)
            self.memory = await backend.memory(_STATUS_LIMIT)
        except BaseException:
            self.backend = None
            await backend.stop(free=False)
            raise
        if self.failures.count:
            self._restarts += 1
        self.failures = policy.Failures(self.failures.count)
        self.state = State.READY
        self.warm = bool(self.config.address or self.config.backend not in OWN_BACKENDS)
        self._ready_at = self.last_used = time.monotonic()
        self._watch = asyncio.ensure_future(self._guard(backend))

    def _load_failed(self, sentence: str) -> ApiError:
        self._fail(sentence, ran=0.0)
        return load_failed(self.key.name, sentence)

    def _fail(self, sentence: str, ran: float) -> None:
        self.failures = policy.after_failure(self.failures, sentence, ran, time.monotonic())
        self.state = State.STOPPED
        self.memory = 0
        # Without a first load of --model the gateway ends, and says why itself.
        if self._ready_at or not self._settings.model:
            _log.error("%s: %s", self.key, sentence)

    async def _guard(self, backend: Backend) -> None:
        """Notice immediately that a backend has ended, and soon that it no longer answers."""
        misses = 0
        while True:
            try:
                await backend.raise_if_ended(_POLL)
                healthy = await backend.healthy(_HEALTH_LIMIT)
            except LoadFailed as end:
                self._lost(backend, str(end))
                return
            if healthy:
                misses = 0
                self.memory = await backend.memory(_STATUS_LIMIT) or self.memory
                continue
            misses += 1
            if misses == _MISSES:
                await backend.end()
                self._lost(backend, f"the backend did not answer Health {misses} times")
                return

    def _lost(self, backend: Backend, sentence: str) -> None:
        """Record that a backend has ended by itself."""
        if self.backend is not backend or self.state is not State.READY:
            return
        watch, self._watch = self._watch, None
        self.backend = None
        self._fail(sentence, time.monotonic() - self._ready_at)
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()
        end = asyncio.ensure_future(backend.stop(free=False))
        self._leaving.add(end)
        end.add_done_callback(self._leaving.discard)

    async def _unload(self, free: bool) -> ApiError | None:
        backend, watch = self.backend, self._watch
        if watch is not None:
            watch.cancel()
        assert backend is not None
        await backend.stop(free)
        self.backend = self._watch = None
        self.failures = policy.Failures()
        self.memory = 0
        self.state = State.STOPPED
        return None
