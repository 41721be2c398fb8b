"""All models, the backends of the loaded ones, and their leases.

`policy` decides and `instance` acts on one model; this module handles what concerns all models:
limits, leases and shutdown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from common.device_memory import device_memory
from common.wording import shown
from gateway import exchange
from gateway.calls import Stub, generate
from gateway.errors import ApiError
from gateway.models.checkpoint import Checkpoints
from gateway.models.config import OWN_BACKENDS, ModelConfig
from gateway.models.reading import ModelFolder
from gateway.settings import GatewaySettings
from gateway.supervisor import failures, policy
from gateway.supervisor.backend import Backend
from gateway.supervisor.catalogue import Catalogue
from gateway.supervisor.failures import LoadFailed
from gateway.supervisor.instance import Key, ModelInstance, ModelStatus, State
from wire import backend_pb2 as pb

AdapterChange = Callable[[dict[str, str]], dict[str, str]]
WarmPrompts = Callable[[ModelConfig], Awaitable[Sequence[pb.PredictOptions]]]
_TICK = 1.0  # seconds between two checks for idle, grown or new models
_log = logging.getLogger("gateway.supervisor")


@dataclass(frozen=True, slots=True)
class Lease:
    """A loaded model, which stays loaded until the lease is released."""

    config: ModelConfig
    backend: Backend

    @property
    def stub(self) -> Stub:
        return self.backend.stub

    @property
    def identity(self) -> str:
        """The ModelIdentity to send with requests."""
        return self.config.parameters.model


class Supervisor:
    """The models, by name and alias, and the backends behind them."""

    def __init__(self, settings: GatewaySettings, folder: ModelFolder) -> None:
        self._settings = settings
        self.catalogue = Catalogue(folder, settings.models_dir, settings.allow_unlisted_models)
        self.checkpoints = Checkpoints(settings.folder)
        self._instances: dict[Key, ModelInstance] = {}
        self._outdated: list[ModelInstance] = []  # instances of files that have changed since
        memory = settings.max_memory_bytes
        self._limits = policy.Limits(
            settings.max_loaded_models, device_memory() if memory is None else memory
        )
        self._background: list[asyncio.Future[None]] = []
        self._preloads: asyncio.Future[None] | None = None
        self._warm_prompts: WarmPrompts | None = None
        self._warming: asyncio.Future[None] | None = None
        self._unwarmable: set[bytes] = set()  # prompts that failed, perhaps with their backend
        self._stopping = False
        self._changing = asyncio.Lock()  # one change of adapters at a time
        self._default_adapters: dict[str, str] = {}  # by model
        self._unused = asyncio.Event()
        self._unused.set()
        self._released = asyncio.Event()

    @property
    def models(self) -> list[ModelConfig]:
        """Every model of the folder, in its order."""
        return [self.checkpoints.completed(model) for model in self.catalogue.models]

    def resolve(self, name: str | None) -> ModelConfig:
        """Return the model as `Catalogue.resolve` does, with the checkpoint's sampling defaults."""
        return self.checkpoints.completed(self.catalogue.resolve(name))

    def status(self) -> list[ModelStatus]:
        """Return every model of the folder, and all other loaded ones."""
        statuses = {Key(model.name): self._stopped(model) for model in self.catalogue.models}
        statuses |= {
            key: replace(instance.status(), leaves_at=self._leaves_at(instance))
            for key, instance in self._instances.items()
        }
        broken = self.catalogue.broken.items()
        return [
            *statuses.values(),
            *(instance.status() for instance in self._outdated),
            *(ModelStatus(name, State.BROKEN, error=sentence) for name, sentence in broken),
        ]

    def context_size(self, model: ModelConfig) -> int | None:
        """Return the context that the backend reported, else the limit of file and checkpoint."""
        instance = self._instances.get(Key(model.name))
        reported = instance.context_size if instance else 0
        return reported or self.checkpoints.context_size(model)

    def context_reason(self, model: ModelConfig) -> str:
        """Return why the context of a loaded model is shorter than the model's own."""
        instance = self._instances.get(Key(model.name))
        return instance.context_reason if instance else ""

    def _stopped(self, model: ModelConfig) -> ModelStatus:
        if self.checkpoints.is_missing(model):
            sentence = f"model {shown(model.parameters.model)} does not exist"
            return ModelStatus(model.name, State.FAILED, error=sentence)
        return ModelStatus(model.name, State.STOPPED)

    def _leaves_at(self, instance: ModelInstance) -> float | None:
        if not (seconds := self._idle_after(instance)):
            return None
        unused = 0.0 if instance.leases else time.monotonic() - instance.last_used
        return time.time() + seconds - unused

    def _idle_after(self, instance: ModelInstance) -> float:
        """Return the seconds without a request after which an instance is unloaded; 0: never."""
        config = instance.config
        seconds = self._settings.idle_unload if config.idle_unload is None else config.idle_unload
        return 0.0 if config.pinned else seconds

    @property
    def preloading(self) -> bool:
        """Whether a model to preload has not been loaded yet."""
        return self._preloads is not None and not self._preloads.done()

    def peek(self, name: str) -> Stub | None:
        """Return a model's backend if it is ready; this does not keep it loaded."""
        instance = self._instances.get(Key(name))
        if instance is None or instance.backend is None or instance.state is not State.READY:
            return None
        return instance.backend.stub

    async def start(self, warm_prompts: WarmPrompts | None = None) -> None:
        """Start watching, and start to preload models. SIGHUP rereads the folder immediately.

        warm_prompts: returns the requests by which a backend reads prompts while it is idle.
        """
        self._warm_prompts = warm_prompts
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)
        if self._limits.memory:
            _log.info(
                "loaded models may use %d MiB together (--max-memory-bytes; 0: no limit)",
                self._limits.memory >> 20,
            )
        self._background = [asyncio.ensure_future(self._keep_within_limits())]
        preload = [model.name for model in self.models if model.preload]
        if preload:
            self._preloads = asyncio.ensure_future(self._load_all(preload))
            self._background.append(self._preloads)

    def reload(self, *, read: bool = True) -> None:
        """Read the models folder again; a changed model is unloaded once it is idle."""
        if read:
            self.catalogue.adopt(self.catalogue.read(always=True))
        for key, instance in list(self._instances.items()):
            try:
                config = self.catalogue.resolve(key.name)
            except ApiError:
                config = None
            if config != instance.config:
                self._outdated.append(self._instances.pop(key))

    async def stop(self, patience: float = 0.0, after: float = 0.0) -> None:
        """Refuse new requests, give running ones `patience` seconds more, and end every process.

        after: the seconds for which requests have already been awaited.
        """
        self._stopping = True
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        for task in (*self._background, *filter(None, [self._warming])):
            task.cancel()
        loading = [i for i in self._all() if i.state is not State.READY]
        await asyncio.gather(*(instance.shut() for instance in loading))
        try:
            async with asyncio.timeout(patience):
                await self._unused.wait()
        except TimeoutError:
            _log.warning("cancelling requests that still run after %g s", after + patience)
        await asyncio.gather(*(instance.shut() for instance in self._all()))

    @asynccontextmanager
    async def lease(self, name: str | None, draft_model: str | None = None) -> AsyncIterator[Lease]:
        """Yield a loaded model, with a draft model that its file offers. Raises ApiError."""
        instance = self._instance(self.catalogue.resolve(name), draft_model or "")
        instance.leases += 1
        self._unused.clear()
        if self._warming is not None:
            self._warming.cancel()  # its backend stops within a step, and stores what it has read
        try:
            await self._until_usable(instance)
            assert instance.backend is not None
            yield Lease(instance.config, instance.backend)
        finally:
            self._release(instance)

    async def load(self, name: str) -> None:
        """Load a model as its first request would. Raises ApiError."""
        async with self.lease(name):
            return

    def begin_load(self, name: str) -> None:
        """Load a model without waiting for it. Raises ApiError for one that does not exist."""
        name = self.catalogue.resolve(name).name
        self._background.append(asyncio.ensure_future(self._load_all([name])))

    async def unload(self, name: str) -> None:
        """Unload a model, with all its variants. Raises ApiError 409 while requests use it."""
        config = self.catalogue.resolve(name)
        found = [i for key, i in self._instances.items() if key.name == config.name]
        if any(instance.leases for instance in found):
            raise failures.in_use(config.name)
        for instance in found:
            if instance.state is State.READY:
                instance.begin_unload("requested")
        for instance in found:
            if instance.working:
                await instance.settled()

    async def change_adapters(self, name: str, change: AdapterChange) -> None:
        """Change the adapters of a model, which is loaded for it. Raises ApiError.

        The change is completed even if the caller does not wait for it.

        change: returns the new adapters, by name; raises ApiError.
        """
        work = asyncio.ensure_future(self._change_adapters(name, change))
        self._background.append(work)
        await asyncio.shield(work)

    async def _change_adapters(self, name: str, change: AdapterChange) -> None:
        async with self._changing, self.lease(name):
            before = self.catalogue.model_named(name)
            config = self.catalogue.with_adapters(name, change(dict(before.adapters)))
            if config.backend not in OWN_BACKENDS:
                raise failures.adapters_refused(LoadFailed("another backend does not apply them"))
            instances = [i for key, i in self._instances.items() if key.name == before.name]
            done: list[ModelInstance] = []
            for instance in instances:
                instance.leases += 1
            try:
                for instance in instances:
                    await instance.change_adapters(config)
                    done.append(instance)
                self.catalogue.change(config)
            except LoadFailed as problem:
                for instance in done:
                    with contextlib.suppress(LoadFailed):
                        await instance.change_adapters(before)
                _log.error("%s: the adapters stay as they are: %s", name, problem)
                raise failures.adapters_refused(problem) from None
            finally:
                for instance in instances:
                    self._release(instance)
            if self._default_adapters.get(config.name) not in config.adapters:
                self._default_adapters.pop(config.name, None)

    def default_adapter(self, config: ModelConfig) -> str:
        """Return the adapter of requests to a model that name none; '' if there is none."""
        name = self._default_adapters.get(config.name, "")
        return name if name in config.adapters else ""

    def set_default_adapter(self, config: ModelConfig, adapter: str) -> None:
        self._default_adapters[config.name] = adapter

    async def remove(self, name: str) -> None:
        """Unload a model, and stop serving it (see `Catalogue.remove`). Raises ApiError."""
        name = self.catalogue.model_named(name).name
        await self.unload(name)
        self.catalogue.remove(name)
        self.reload(read=False)

    def _instance(self, config: ModelConfig, draft: str) -> ModelInstance:
        if draft and draft not in (config.draft_model, *config.draft_models):
            if exchange.current().strict:
                raise failures.not_listed("draft_model", draft, config.draft_models)
            exchange.current().ignore("draft_model")  # a draft model does not change the answer
        draft = draft if draft in config.draft_models and draft != config.draft_model else ""
        key = Key(config.name, draft)
        if key not in self._instances:
            self._instances[key] = ModelInstance(key, config, self._settings)
        return self._instances[key]

    def _all(self) -> list[ModelInstance]:
        return [*self._instances.values(), *self._outdated]

    def _release(self, instance: ModelInstance) -> None:
        instance.leases -= 1
        instance.last_used = time.monotonic()
        self._released.set()
        if not any(other.leases for other in self._all()):
            self._unused.set()

    async def _until_usable(self, instance: ModelInstance) -> None:
        patience = time.monotonic() + self._settings.load_timeout
        while True:
            if self._stopping:
                raise failures.stopping()
            if await instance.usable():
                return
            loads = instance.working or self._begin_load(instance)
            exchange.current().waits.set()
            if not loads:
                if time.monotonic() > patience:
                    raise failures.no_room(instance.key.name)
                await self._until_one_is_released()
                continue
            problem = await instance.settled()
            if problem is not None:
                raise problem

    async def _until_one_is_released(self) -> None:
        """Wait briefly for a released lease; a stopping backend frees memory as well."""
        self._released.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK):
                await self._released.wait()

    def _begin_load(self, instance: ModelInstance) -> bool:
        """Free memory and start the load; False if models in use prevent it. Raises ApiError."""
        now = time.monotonic()
        name, past = instance.key.name, instance.failures
        if past.retry_at > now:
            raise failures.backing_off(name, past.sentence, math.ceil(past.retry_at - now))
        coming = self._expected(instance)
        if self._limits.memory and coming > self._limits.memory:
            raise failures.too_large(name, coming, self._limits.memory)
        sharing = self._at_the_address_of(instance)
        if any(other.leases or other.state is not State.READY for other in sharing):
            return False
        loaded = [each for each in self._loaded() if each.model not in sharing]
        leaving = policy.to_unload(loaded, coming, self._limits)
        if leaving is None:
            if policy.may_fit(loaded, coming, self._limits):
                return False
            raise failures.no_room(name)
        for other in sharing:
            other.begin_unload(f"its backend will serve {instance.key}")
        _unload(leaving, f"to free memory for {instance.key}")
        ends = [i.work for i in self._all() if i.state is State.STOPPING and i.work]
        instance.begin_load(after=ends)
        return True

    def _at_the_address_of(self, instance: ModelInstance) -> list[ModelInstance]:
        """Return the other instances at an address, whose backend serves one model at a time."""
        address = instance.config.address
        return [
            other
            for other in self._all()
            if address
            and other is not instance
            and other.config.address == address
            and other.occupied
        ]

    def _loaded(self) -> list[policy.Loaded[ModelInstance]]:
        return [
            policy.Loaded(
                instance,
                0 if instance.config.address else instance.memory or self._expected(instance),
                instance.leases > 0 or instance.state is not State.READY,
                instance.config.pinned,
                instance.last_used,
                self._idle_after(instance),
            )
            for instance in self._all()
            if instance.occupied
        ]

    def _expected(self, instance: ModelInstance) -> int:
        # A backend at an address may be on another machine.
        if not self._limits.memory or instance.config.address:
            return 0
        return self.checkpoints.weight_bytes(instance.config)

    async def _keep_within_limits(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            try:
                if (read := await asyncio.to_thread(self.catalogue.read)) is not None:
                    self.catalogue.adopt(read)
                    self.reload(read=False)
                self._background = [task for task in self._background if not task.done()]
                self._forget()
                _unload(policy.idle(self._loaded(), time.monotonic()), "idle")
                _unload(policy.over_limits(self._loaded(), self._limits), "over the limits")
                self._warm_while_idle()
            except Exception as fault:  # the next round may succeed
                _log.error("the limits could not be enforced this time: %r", fault)

    def _warm_while_idle(self) -> None:
        """Read the prompts of a model after its load, while no request uses any model."""
        cold = [i for i in self._instances.values() if i.state is State.READY and not i.warm]
        warming = self._warming is not None and not self._warming.done()
        if cold and not warming and self._warm_prompts and self._unused.is_set():
            self._warming = asyncio.ensure_future(self._warm(cold[0], self._warm_prompts))

    async def _warm(self, instance: ModelInstance, prompts: WarmPrompts) -> None:
        """Read the prompts. Neither the idle time of the model nor the metrics count them."""
        backend, began, count = instance.backend, time.monotonic(), 0
        assert backend is not None
        exchange.begin(exchange.Exchange("warm-prompt", "", ""))
        for prompt in await prompts(instance.config):
            key = prompt.SerializeToString(deterministic=True)
            if key in self._unwarmable:
                continue
            prompt.ModelIdentity = instance.config.parameters.model
            try:
                async for _ in generate(backend.stub, prompt):
                    pass
            except ApiError as problem:
                if instance.state is not State.STOPPING:
                    self._unwarmable.add(key)
                    _log.warning("%s: a prompt was not read ahead: %s", instance.key, problem)
                return  # the others are read in the next round, if the backend still runs
            count += 1
        instance.warm = True
        if count:
            seconds = time.monotonic() - began
            _log.info("%s: read %d prompts ahead in %.1f s", instance.key, count, seconds)

    def _forget(self) -> None:
        """Remove instances that no file describes any more, and idle unlisted models."""
        for instance in self._outdated:
            if instance.state is State.READY and not instance.leases:
                instance.begin_unload("its file has changed")
        self._outdated = [i for i in self._outdated if i.leases or not i.at_rest]
        names = {model.name for model in self.models}
        for key, instance in list(self._instances.items()):
            if key.name not in names and not instance.leases and instance.at_rest:
                del self._instances[key]

    async def _load_all(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                await self.load(name)
            except Exception as problem:  # the other models still have to be preloaded
                if not isinstance(problem, ApiError) or problem.code != failures.LOAD_FAILED:
                    _log.error("%s is not loaded: %s", name, problem)


def _unload(leaving: Sequence[policy.Loaded[ModelInstance]], reason: str) -> None:
    for each in leaving:
        each.model.begin_unload(reason)
