"""Runs all transcriptions: one window, or less, in each step, taking turns.

Everything happens on the engine thread. Between two steps, other commands are handled: a request is
cancelled after its current window, and another one waits for a window, not for a recording.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from backend.engine.device import return_buffers
from backend.engine.engine_state import Gauges
from backend.engine.errors import EngineError, EngineFailed, Overloaded, is_allocation_failure
from backend.engine.events import Finished, Usage
from backend.engine.speech.transcript import Speech, Transcribed
from backend.engine.units import MIB

Publish = Callable[[int, Transcribed | Finished | EngineError], None]
Report = Callable[[str, BaseException], None]
Transcribe = Callable[[Speech], Iterator[Transcribed | None]]


@dataclass(eq=False, slots=True)
class _Job:
    ticket: int
    parts: Iterator[Transcribed | None]
    needs: int
    tokens: int = 0
    begun: bool = False


class SpeechQueue:
    """The queue of one loaded model.

    transcribe: yields a recording's segments window by window.
    needs: the bytes for a recording.
    slots: how many recordings take turns; later ones wait.
    budget: bytes that are left after the weights.
    publish: called with events.
    report: logs a fault.
    """

    short = False  # a failed allocation ends its request: memory is reserved before it begins

    def __init__(
        self,
        transcribe: Transcribe,
        needs: Callable[[Speech], int],
        slots: int,
        budget: int,
        publish: Publish,
        report: Report,
        gauges: Gauges,
    ) -> None:
        self._transcribe = transcribe
        self._needs = needs
        self._slots = slots
        self.budget = budget
        self._publish = publish
        self._report = report
        self._gauges = gauges
        self._jobs: deque[_Job] = deque()  # the next one first; those that wait are last
        self._seconds: float | None = None  # duration of the longest step

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    @property
    def needs(self) -> int:
        """Bytes that the running transcriptions need."""
        return sum(job.needs for job in self._jobs if job.begun)

    def submit(self, ticket: int, speech: Speech) -> None:
        """Queue a recording; publish Overloaded if it does not fit in memory."""
        needs = self._needs(speech)
        if needs > self.budget:
            self._publish(
                ticket,
                Overloaded(
                    f"transcribing this recording needs {needs // MIB} MiB, but the model leaves"
                    f" only {self.budget // MIB} MiB: send a shorter one, or raise memory_limit_mib"
                ),
            )
            return
        self._jobs.append(_Job(ticket, self._transcribe(speech), needs))
        self._count()

    def cancel(self, ticket: int) -> None:
        """Drop a request. Nothing is published: the caller already knows."""
        for job in [job for job in self._jobs if job.ticket == ticket]:
            self._drop(job)

    def cancel_all(self, error: EngineError) -> None:
        """End every request with an error."""
        while self._jobs:
            self._publish(self._jobs[0].ticket, error)
            self._drop(self._jobs[0])

    def step(self, *, running: bool, budget: int | None = None) -> None:  # noqa: ARG002
        """Continue one transcription until a window ends, or earlier after a short time."""
        job = self._jobs[0]
        self._gauges.heartbeat.begin("window of speech", expected=self._seconds)
        started = time.perf_counter()
        try:
            part = next(job.parts)
        except StopIteration:
            self._drop(job)
            self._publish(job.ticket, Finished("stop", Usage(completion_tokens=job.tokens)))
            return
        except Exception as fault:
            self._failed(job, fault)
            return
        self._seconds = max(self._seconds or 0.0, time.perf_counter() - started)
        job.begun = True
        self._jobs.popleft()
        self._jobs.insert(self._before(job), job)
        if part is not None:
            tokens = sum(len(segment.tokens) for segment in part.segments)
            job.tokens += tokens
            self._gauges.tokens_generated += tokens
            self._publish(job.ticket, part)

    def _before(self, job: _Job) -> int:
        """Return how many of the other jobs run before its next turn: those with memory."""
        count, used = 0, job.needs
        for other in list(self._jobs)[: self._slots - 1]:
            used += other.needs
            if used > self.budget:
                break
            count += 1
        return count

    def _failed(self, job: _Job, fault: Exception) -> None:
        self._drop(job)
        failure: EngineError
        if is_allocation_failure(fault):
            failure = Overloaded(
                f"the device is out of memory: {mx.get_active_memory() // MIB} MiB are in use;"
                " send the recording again later, or lower memory_limit_mib"
            )
        else:
            failure = EngineFailed(f"the model failed on this recording ({type(fault).__name__})")
        self._report("transcription", fault)
        self._publish(job.ticket, failure)

    def _drop(self, job: _Job) -> None:
        """Forget a job, and free what it holds."""
        self._jobs.remove(job)
        job.parts = iter(())
        return_buffers()
        self._count()

    def _count(self) -> None:
        self._gauges.running = min(len(self._jobs), self._slots)
