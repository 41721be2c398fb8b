"""The engine thread: the only thread that creates or uses an MLX object.

The thread gets commands from a queue, and delivers publications in batches, once per round. If
there is nothing to do, it waits for the queue. One stage of a load runs per round, so that streams
continue.
mlx and the packages that use it are imported with the first load, so that the process answers
Health earlier.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from backend.engine.commands import Cancel, Command, Encode, Free, Load, MeasureMemory, Stop, Submit
from backend.engine.device import drop_shared_arrays, release_memory
from backend.engine.engine_state import Gauges
from backend.engine.errors import Cancelled, EngineError, EngineFailed, NotLoaded, ShuttingDown
from backend.engine.outbox import Outbox, Publication
from common.machine_memory import return_freed_memory

if TYPE_CHECKING:
    from backend.engine.loading.stages import Stages
    from backend.engine.model import Built, EngineModel, NewQueue, RowQueue
    from backend.engine.planning.prefix_index import PrefixKey
    from backend.engine.scheduler import Scheduler
    from backend.engine.served_model import ServedModel

_log = logging.getLogger(__name__)

_GATHER_SECONDS = 0.025  # maximum time for which the first of several announced prompts waits
_LINGER_SECONDS = 0.01  # maximum time for which a prompt waits for others not announced yet
_LINGER_SHARE = 0.1  # the same wait as a share of the prompt's prefill time
_LEAST_LINGER = 0.002  # minimum of this wait: the event loop can read another request meanwhile
_COMPANY_SECONDS = 0.05  # time after which a prompt counts as alone, and does not wait
_QUIET_SECONDS = 1.0  # time without a command before a load's remaining work goes on
_CHECK_SECONDS = 0.002  # interval of checks for prompts that are being prepared


class Worker:
    """Runs the engine thread. All public methods may be called from any thread.

    deliver: called with the publications of a round, in order.
    fatal: called once, with the cause, when the engine has failed; the thread then ends.
    """

    def __init__(
        self, deliver: Callable[[list[Publication]], None], fatal: Callable[[str], None]
    ) -> None:
        self._fatal = fatal
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._outbox = Outbox(deliver)
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._epoch = 0
        self._scheduler: Scheduler | None = None
        self._encoder: RowQueue | None = None
        self._later: Stages[None] | None = None
        self.gauges = Gauges()
        self._announced: set[int] = set()
        self._gather_until = self._linger_until = 0.0
        self._submitted_at = float("-inf")  # when the latest prompt arrived
        self._suspect = False
        self._stopping = False

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def announce(self, ticket: int) -> None:
        """Announce a prompt that is being prepared, whose command will come in milliseconds."""
        self._announced.add(ticket)

    def withdraw(self, ticket: int) -> None:
        """Withdraw an announcement: the command was sent, or will not come soon."""
        self._announced.discard(ticket)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the loaded text model. For the engine thread."""
        assert self._scheduler is not None
        return self._scheduler

    def known(self, prompt: PrefixKey) -> tuple[int, int]:
        """Return how many of the prompt's tokens have KV in memory, and the bytes free for more.

        Both numbers may be outdated.
        """
        if (scheduler := self._scheduler) is None:
            return 0, 0
        planner = scheduler.planner
        return planner.entries.index.find(prompt).length, planner.unused

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread; returns False if it is still running."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self) -> None:
        heartbeat = self.gauges.heartbeat
        drop_shared_arrays()  # of an earlier engine in this process
        try:
            while not self._stopping:
                self._take_commands()
                generating = self._scheduler is not None and self._scheduler.busy
                if self._scheduler is not None and generating:
                    self._scheduler.step()
                if self._encoder is not None:
                    self._encode_rows(self._encoder, running=generating)
                if self._suspect:
                    heartbeat.begin("check after a fault")
                    self._probe()
                self._outbox.flush()
        except BaseException as fault:
            _log.critical("the engine thread failed", exc_info=fault)
            self._fatal(f"the engine has failed: {type(fault).__name__}: {fault}")
        finally:
            self._refuse_rest()
            self._outbox.flush(everything=True)
            self._drop_model()
            self._clear_streams()

    def _take_commands(self) -> None:
        idle = not any(rows is not None and rows.busy for rows in (self._scheduler, self._encoder))
        if idle:
            self.gauges.heartbeat.rest()
        while (command := self._next_command(block=idle)) is not None:
            idle = False
            loads = isinstance(command, Load)
            if loads:
                self._outbox.flush(everything=True)
            self.gauges.heartbeat.begin(f"command {type(command).__name__}", loads=loads)
            self._handle(command)
            if loads or self._stopping:
                return  # one step runs between two stages of a load

    def _next_command(self, *, block: bool) -> Command | None:
        """Return the next command; None if there is none to wait for.

        Before the first of several prompts starts, this waits for other prompts that are about to
        come: prefilling all of them together is faster than prefilling the first alone and the
        others between its decode steps.
        block: whether to wait until a command comes.
        """
        if block:
            return self._wait()
        while True:
            # Read first: a command is sent before its announcement is withdrawn.
            until = self._gather_until if self._announced else self._linger_until
            if not self._inbox.empty():  # quicker than an exception, and no other thread takes any
                return self._inbox.get()
            left = min(until, self._gather_until) - time.monotonic()
            if left <= 0 or not self._only_waiting:
                return None
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=min(left, _CHECK_SECONDS))

    def _wait(self) -> Command:
        """Wait for the next command; meanwhile, do the remaining work of a load in stages."""
        quiet = _QUIET_SECONDS
        while self._later is not None:
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=quiet)
            self._continue(self._later)
            quiet = 0.0
        return self._inbox.get()

    def _continue(self, later: Stages[None]) -> None:
        """Run a stage of a load's remaining work. A fault only ends that work."""
        self.gauges.heartbeat.begin("remaining work of a load", loads=True)
        try:
            next(later)
        except StopIteration:
            self._later = None
            return_freed_memory()
        except Exception:
            _log.warning("the remaining work of a load failed", exc_info=True)
            self._later = None
        self.gauges.heartbeat.rest()

    @property
    def _only_waiting(self) -> bool:
        """Whether there are requests and none of them runs."""
        if self._scheduler is None or (self._encoder is not None and self._encoder.busy):
            return False
        return self._scheduler.waiting and not self._scheduler.planner.sequences.admitted

    def _handle(self, command: Command) -> None:
        match command:
            case Submit() | Encode() if command.epoch != self._epoch:
                self.withdraw(command.ticket)
                unloaded = NotLoaded("it was unloaded before the request began")
                self._outbox.publish(command.ticket, unloaded)
            case Submit():
                self._submit(command)
            case Encode():
                assert self._encoder is not None
                self._encoder.submit(command.ticket, command.pieces)
            case Cancel(ticket):
                self._outbox.cancelled(ticket)
                for rows in (self._scheduler, self._encoder):
                    if rows is not None:
                        rows.cancel(ticket)
            case Load():
                self._load(command)
            case Free(done):
                if not done.set_running_or_notify_cancel():
                    return
                self._end_all(Cancelled("the model was unloaded"))
                self._drop_model()
                done.set_result(None)
            case MeasureMemory(done):
                if done.set_running_or_notify_cancel():
                    done.set_result(self._memory())
            case Stop():
                self._end_all(ShuttingDown())
                self._stopping = True

    def _submit(self, command: Submit) -> None:
        self.withdraw(command.ticket)
        now, scheduler = time.monotonic(), self.scheduler
        if not scheduler.waiting:
            self._gather_until = now + _GATHER_SECONDS
        if now - self._submitted_at < _COMPANY_SECONDS:
            share = scheduler.prefill_seconds(command) * _LINGER_SHARE
            self._linger_until = now + min(max(share, _LEAST_LINGER), _LINGER_SECONDS)
        self._submitted_at = now
        try:
            scheduler.submit(command)
        except Exception as fault:
            self._report("the start of a request", fault)
            scheduler.cancel(command.ticket)
            failure = f"the request could not be started ({type(fault).__name__})"
            self._outbox.publish(command.ticket, EngineFailed(failure))

    def _encode_rows(self, encoder: RowQueue, *, running: bool) -> None:
        """Run one batch of rows if the running sequences leave memory for the first row."""
        budget = encoder.budget
        if self._scheduler is not None:
            budget = min(self._scheduler.lend(encoder.needs), budget)
            if budget < encoder.needs and self._scheduler.busy:
                return
        if encoder.busy:
            self._outbox.flush(everything=True)
            encoder.step(running=running, budget=budget)
            if encoder.short and self._scheduler is not None:
                self._scheduler.shed()

    def _load(self, command: Load) -> None:
        """Run a stage. The current model serves until the new one is complete."""
        if not command.done.set_running_or_notify_cancel():
            return
        try:
            if command.abandoned.is_set():
                raise Cancelled("the load was cancelled")
            thread = next(command.stages)
        except StopIteration as finished:
            result: Built | ServedModel = finished.value
        except BaseException as fault:
            command.stages.close()
            # The frames of the traceback refer to weights that were already read.
            command.done.set_exception(fault.with_traceback(None))
            del fault
            release_memory()
            return
        else:
            command.done.set_result(thread)
            return
        command.done.set_result(self._take_over(*result) if isinstance(result, tuple) else result)

    def _take_over(
        self, model: EngineModel | None, new_encoder: NewQueue | None, served: ServedModel
    ) -> ServedModel:
        from backend.engine.scheduler import Scheduler

        self._end_all(Cancelled("another model was loaded"))
        self._drop_model()
        if model is not None:
            self._outbox.interval = model.stream_interval_ms / 1e3
            self._later, model.later = model.later, None
            self._scheduler = Scheduler(
                model,
                self._outbox.publish,
                self._report,
                self.gauges,
                self._outbox.flush,
                more=lambda: bool(self._announced) or not self._inbox.empty(),
            )
        if new_encoder is not None:
            self._encoder = new_encoder(self._outbox.publish, self._report, self.gauges)
        self._epoch = served.epoch
        return_freed_memory()  # such as the weights in their original type
        return served

    def _memory(self) -> dict[str, int]:
        """Return the bytes that MLX has allocated, and the loaded model's parts of them.

        Nothing is being computed meanwhile, so the parts add up to all that is in use.
        """
        if "mlx.core" not in sys.modules:
            return {}
        import mlx.core as mx

        mx.synchronize()
        parts = {"mlx_active": mx.get_active_memory(), "mlx_cache": mx.get_cache_memory()}
        return parts | (self._scheduler.memory() if self._scheduler is not None else {})

    def _refuse_rest(self) -> None:
        """Answer commands that come after the end, so that no caller waits for ever."""
        while not self._inbox.empty():
            match self._inbox.get():
                case Submit(ticket=ticket) | Encode(ticket=ticket):
                    self._outbox.publish(ticket, ShuttingDown())
                case Load() | Free() | MeasureMemory() as command:
                    if isinstance(command, Load):
                        command.stages.close()
                    if command.done.set_running_or_notify_cancel():
                        command.done.set_exception(ShuttingDown())

    def _end_all(self, error: EngineError) -> None:
        for rows in (self._scheduler, self._encoder):
            if rows is not None:
                rows.cancel_all(error)
        self._outbox.flush(everything=True)

    def _drop_model(self) -> None:
        if self._scheduler is not None or self._encoder is not None:
            self._scheduler = self._encoder = self._later = None
            self._epoch = 0  # of no load
            self.gauges.drafting = self.gauges.experts = None
            release_memory()

    def _report(self, where: str, fault: BaseException) -> None:
        _log.error("%s failed", where, exc_info=fault)
        self._suspect = True

    def _probe(self) -> None:
        """Check after a fault that MLX still computes; if not, no request can be served."""
        import mlx.core as mx

        self._suspect = False
        mx.eval(mx.random.normal((8,)) + 1)

    def _clear_streams(self) -> None:
        """Delete the thread's streams: MLX may abort at exit if they outlive the thread."""
        if "mlx.core" in sys.modules:
            import mlx.core as mx

            mx.clear_streams()
