"""Runs the rows of all Embedding, Rerank and TokenClassify requests.

Everything happens on the engine thread, one `step` at a time, between the decode steps of a
generative model. Rows wait in buckets by length, and have numbered turns: each turn has a few rows
of every waiting request. A request of one text therefore does not wait for all texts of another,
and no row starves, because later requests get later turns. The bucket with the earliest row runs
first. A request is answered when the last of its rows has run.

Rows are padded to the longest row of their step, so all are of one bucket. Two limits apply to a
step: the number of tokens with padding, which determines its duration, and the number of bytes that
attention needs.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter

import mlx.core as mx
import numpy as np

from backend.engine.device import return_buffers
from backend.engine.embedding.encoding import Encoded, Piece
from backend.engine.engine_state import Gauges
from backend.engine.errors import EngineError, EngineFailed, Overloaded, is_allocation_failure
from backend.engine.heartbeat import counted
from backend.engine.planning.pace import Pace
from backend.engine.units import MIB

_SHORTEST = 16  # tokens of the shortest bucket
_ROWS_IN_TURN = 4
_TURN = attrgetter("turn")
_TIDY_EVERY = 256  # steps between two returns of freed buffers to the system

Run = Callable[[Sequence[Piece]], list[np.ndarray]]
Publish = Callable[[int, "Encoded | EngineError"], None]
Report = Callable[[str, BaseException], None]


@dataclass(frozen=True, slots=True)
class ActivationCost:
    """The bytes that a forward pass needs in addition to the weights."""

    heads: int  # attention heads, each with length² scores
    hidden: int  # values per token that are in memory at the same time, besides the scores
    itemsize: int  # bytes per value

    def of(self, rows: int, length: int) -> int:
        """Return the bytes for `rows` rows, each padded to `length` tokens."""
        scores = 2 * self.heads * length * length
        return rows * (scores + self.hidden * length) * self.itemsize


def bucket_of(length: int) -> int:
    """Return the bucket of a length. If rows are of one bucket, less than a third is padding."""
    if length <= _SHORTEST:
        return _SHORTEST
    power = 1 << (length - 1).bit_length()
    return power * 3 // 4 if length <= power * 3 // 4 else power


def rows_that_fit(lengths: Iterable[int], tokens: int, cost: ActivationCost, budget: int) -> int:
    """Return how many rows, starting with the first, fit into one step; always at least one.

    tokens: maximum number of tokens, including padding.
    budget: maximum number of bytes.
    """
    rows = longest = 0
    for length in lengths:
        wider = max(longest, length)
        if rows and ((rows + 1) * wider > tokens or cost.of(rows + 1, wider) > budget):
            return rows
        rows, longest = rows + 1, wider
    return rows


@dataclass(eq=False, slots=True)
class _Job:
    """A request, and the outputs of its rows so far."""

    ticket: int
    outputs: list[np.ndarray | None]
    left: int  # rows that have not run
    dropped: bool = False


@dataclass(eq=False, slots=True)
class _Row:
    """A waiting row of a request."""

    job: _Job
    index: int  # the index of the row in its request
    piece: Piece
    turn: int  # the turn in which the row runs
    retried: bool = False  # whether the row runs once more, alone, after a failed allocation

    @property
    def length(self) -> int:
        return len(self.piece.ids)


@dataclass(eq=False)
class EncodeQueue:
    """The queue of one loaded model."""

    run: Run  # runs the model on one batch, and returns an output for each piece
    cost: ActivationCost  # the memory that a batch needs
    pace: Pace  # decides the number of tokens, including padding, in a step
    budget: int  # bytes that are left after the weights
    publish: Publish  # called with a request's answer or error
    report: Report  # logs a fault
    gauges: Gauges
    # Whether the latest step failed for lack of memory. Its rows run once more, one by one.
    short: bool = field(default=False, init=False)
    _jobs: dict[int, _Job] = field(default_factory=dict, init=False)  # by ticket
    # The first row of each bucket is never of a dropped job; others may be.
    _buckets: dict[int, deque[_Row]] = field(default_factory=dict, init=False)
    _turn: int = field(default=0, init=False)  # the turn of the latest step's first row
    _steps: int = field(default=0, init=False)

    @property
    def busy(self) -> bool:
        return bool(self._buckets)

    @property
    def needs(self) -> int:
        """The minimum number of bytes that the next step needs: the bytes for its first row."""
        return self.cost.of(1, self._next[0].length) if self._buckets else 0

    @property
    def _next(self) -> deque[_Row]:
        """The bucket whose first row is the next to run: a row that is run again, or the oldest."""
        return min(self._buckets.values(), key=lambda rows: (not rows[0].retried, rows[0].turn))

    def submit(self, ticket: int, pieces: Sequence[Piece]) -> None:
        """Queue a request's rows; publish Overloaded if one row alone does not fit in memory."""
        longest = max(len(piece.ids) for piece in pieces)
        needed = self.cost.of(1, longest)
        if needed > self.budget:
            self.publish(
                ticket,
                Overloaded(
                    f"a text of {longest} tokens needs {needed // MIB} MiB, but the model leaves"
                    f" only {self.budget // MIB} MiB: send a shorter text, or raise"
                    " memory_limit_mib"
                ),
            )
            return
        count = len(pieces)
        job = self._jobs[ticket] = _Job(ticket, [None] * count, count)
        for index, piece in enumerate(pieces):
            row = _Row(job, index, piece, self._turn + 1 + index // _ROWS_IN_TURN)
            waiting = self._buckets.setdefault(bucket_of(row.length), deque())
            insort(waiting, row, key=_TURN)

    def cancel(self, ticket: int) -> None:
        """Drop a request without publishing an answer, because the caller has cancelled it."""
        if (job := self._jobs.pop(ticket, None)) is not None:
            job.dropped = True
            self._drop_first_rows()

    def cancel_all(self, error: EngineError) -> None:
        """End every request with an error."""
        jobs, self._jobs = self._jobs, {}
        self._buckets.clear()
        for ticket in jobs:
            self.publish(ticket, error)

    def step(self, *, running: bool, budget: int | None = None) -> None:
        """Run one batch.

        running: whether generation streams are waiting for this step to end.
        budget: bytes that the step may use; None means all that the weights leave.
        """
        rows = self._take(
            self.pace.tokens(running=running), self.budget if budget is None else budget
        )
        padded = len(rows) * max(row.length for row in rows)
        expected = self.pace.seconds(padded) if self.pace.known else None
        self.gauges.heartbeat.begin(f"pass over {counted(len(rows), 'text')}", expected=expected)
        self.short = False
        started = time.perf_counter()
        try:
            outputs = self.run([row.piece for row in rows])
        except Exception as fault:
            self._failed(rows, fault)
            return
        tokens = sum(row.length for row in rows)
        self.pace.measured(padded, time.perf_counter() - started)
        self.gauges.prompt_tokens_processed += tokens
        for row, output in zip(rows, outputs, strict=True):
            self._store(row, output)
        self._steps += 1
        if not self.busy or self._steps % _TIDY_EVERY == 0:
            return_buffers()

    def _failed(self, rows: Sequence[_Row], fault: Exception) -> None:
        """Handle a failed step. After a failed allocation, its rows wait to run one by one."""
        self.short = is_allocation_failure(fault)
        if self.short and not rows[0].retried:
            return_buffers()
            waiting = self._buckets.setdefault(bucket_of(rows[0].length), deque())
            waiting.extendleft(reversed(rows))
            for row in rows:
                row.retried = True
            return
        failure: EngineError
        if isinstance(fault, EngineError):
            failure = fault
        else:
            self.report("encoding", fault)
            failure = EngineFailed(f"the model failed on this request ({type(fault).__name__})")
        if self.short:
            longest = max(row.length for row in rows)
            failure = Overloaded(
                f"the device is out of memory: {mx.get_active_memory() // MIB} MiB are in use, and"
                f" a text of {longest} tokens needs about {self.cost.of(1, longest) // MIB} MiB:"
                " send it again later, send a shorter text, or lower memory_limit_mib"
            )
        for ticket in {row.job.ticket for row in rows}:
            self._fail(ticket, failure)

    def _take(self, tokens: int, budget: int) -> list[_Row]:
        """Remove and return the next step's rows: the earliest row and others of its bucket."""
        waiting = self._next
        self._turn = waiting[0].turn
        count = 1
        if not waiting[0].retried:
            left = (row for row in waiting if not row.job.dropped)
            fresh = takewhile(lambda row: not row.retried, left)
            count = rows_that_fit((row.length for row in fresh), tokens, self.cost, budget)
        rows: list[_Row] = []
        while len(rows) < count:
            row = waiting.popleft()
            if not row.job.dropped:
                rows.append(row)
        self._drop_first_rows()
        return rows

    def _store(self, row: _Row, output: np.ndarray) -> None:
        """Store a row's output, and answer its request if all rows have outputs."""
        job = row.job
        if not np.isfinite(output).all():
            job.left = -1
            self._fail(job.ticket, EngineFailed("the model's output is not finite"))
            return
        job.outputs[row.index] = output
        job.left -= 1
        if job.left == 0:
            del self._jobs[job.ticket]
            done = tuple(output for output in job.outputs if output is not None)
            self.publish(job.ticket, Encoded(done))

    def _fail(self, ticket: int, failure: EngineError) -> None:
        self.cancel(ticket)
        self.publish(ticket, failure)

    def _drop_first_rows(self) -> None:
        """Drop rows of dropped jobs from the beginning of each bucket.

        Other rows of dropped jobs are skipped later, because many jobs with many rows may be
        cancelled at once.
        """
        for size, rows in list(self._buckets.items()):
            while rows and rows[0].job.dropped:
                rows.popleft()
            if not rows:
                del self._buckets[size]
