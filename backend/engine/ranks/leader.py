"""Connects rank 0 to the other ranks, and exchanges messages with them.

A rank that is lost after the group was formed cannot be replaced, because MLX can form only one
group per process. So `failed` is called, and the process ends. This module does not use MLX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backend.engine.errors import (
    Cancelled,
    EngineError,
    EngineFailed,
    InvalidRequest,
    ModelRejected,
    RankLost,
    ShuttingDown,
)
from backend.engine.load_request import LoadRequest
from backend.engine.loading.stages import Stages
from backend.engine.ranks import wire
from backend.engine.ranks.fingerprint import require_same
from backend.engine.ranks.link import Link, LinkLost, accept, accepting, after, listen
from backend.engine.ranks.rank_info import (
    TOKEN,
    Loaded,
    Member,
    RankInfo,
    Value,
    hosts_of,
    info_in,
    transport_environ,
    until_ended,
)
from backend.engine.ranks.wire import Message, Plain, Signal, encode, name_of

if TYPE_CHECKING:
    import mlx.core as mx

_log = logging.getLogger(__name__)

_REPORT_SECONDS = 5.0  # seconds between two log lines about missing ranks
_CHECK_SECONDS = 0.2  # seconds between two checks whether a wait was cancelled
# Seconds to wait for the cause of an error: MLX may notice a lost rank before its connection does.
_NAME_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class _Follower:
    """The connection to a rank other than 0, and its unread reports about loads, in order."""

    link: Link
    versions: Mapping[str, str]
    reports: deque[wire.LoadReport] = field(default_factory=deque)


class Leader:
    """The other ranks, from the point of view of rank 0.

    broken: says which rank was lost after the group was formed, and why; '' if no rank was lost.
    shards: the description of each rank's part of the loaded model, by rank.
    """

    member: Member

    def __init__(self, info: RankInfo, token: str) -> None:
        self.info = info
        self.broken = ""
        self.shards: tuple[Value, ...] = ()
        self._token = token
        self._failed: Callable[[str], None] = lambda _: None
        self._listener: socket.socket | None = None
        self._followers: dict[int, _Follower] = {}
        self._changed = threading.Condition()
        self._formed = False  # whether the group is formed, or is being formed
        self._closing = False
        self._refused = ""  # a message about the latest connection that was refused
        self._load = 0  # the number of the current load
        self._refusal = ""  # why another rank has refused the current load

    def open(self, failed: Callable[[str], None]) -> None:
        """Listen for the other ranks. Raises InvalidRequest.

        failed: called on any thread when the group has failed, with the cause.
        """
        self._failed = failed
        host, port = self.info.control
        try:
            self._listener = listen(self.info.control)
        except OSError as fault:
            raise InvalidRequest(
                f"rank 0 cannot listen for the other ranks at {host}:{port}: {fault.strerror}"
            ) from None
        accepting(self._listener, self._take)

    def close(self) -> None:
        """Order all ranks to exit, and close the connections to them."""
        self._closing = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
        for follower in list(self._followers.values()):
            with contextlib.suppress(LinkLost):
                follower.link.send(Signal.STOP)
            follower.link.close()

    def report(self) -> tuple[str, ...]:
        """Return lines for Status: each rank's part of the model, and which rank was lost."""
        lines = tuple(
            f"{self.info.name(rank)}: {shard['words']}, {shard['bytes']} bytes of weights"
            for rank, shard in enumerate(self.shards)
        )
        return (*lines, f"lost: {self.broken}") if self.broken else lines

    # Loads.

    def require_named(self, hostfile: str, transport: str) -> None:
        """Raise InvalidRequest if a load names other ranks or another transport than this process.

        MLX can form only one group per process. Empty strings name nothing.
        """
        info = self.info
        if transport and transport != info.transport:
            raise InvalidRequest(
                f"option distributed_backend is {transport}, but the ranks of this process use"
                f" {info.transport}: leave it out, or start another process"
            )
        if hostfile:
            named = hosts_of(hostfile)
            if named != list(zip(info.hosts, info.ports, strict=False)):
                raise InvalidRequest(
                    f"option hostfile names {len(named)} ranks, which are not the {info.size} of"
                    " this process: leave it out, or start another process"
                )

    def form(self, timeout: float, cancelled: threading.Event) -> Stages[None]:
        """Form the group of ranks, if it is not formed yet; the last stage is on the engine thread.

        Raises ShuttingDown if a rank does not join in time, RankLost if a rank is lost, and
        ModelRejected if a rank has other versions of packages.
        """
        yield "files"
        while not self._formed:
            self._wait_while(self._missing, cancelled, self.info.join_timeout)
            yield "engine"
            with self._changed:
                if complete := not self._missing():
                    software = {
                        rank: follower.versions for rank, follower in self._followers.items()
                    }
                    require_same(self.info, software)
                    self._formed = True
            if complete:
                self._join(timeout)
            else:
                yield "files"
        yield "engine"

    def _join(self, timeout: float) -> None:
        """Join the group, at the same time as all other ranks.

        Ranks cannot send heartbeats while they join, so the time-out is not shorter than the
        default.
        """
        from backend.engine.ranks.sharding import join_group

        self._set_timeout(max(timeout, self.info.timeout))
        self.send(Signal.JOIN)
        try:
            join_group(self.info)
        except EngineFailed as fault:
            self._failed(str(fault))  # MLX can form a group only once
            raise
        _log.info("the %s group of %d ranks is formed", self.info.transport, self.info.size)

    def begin(
        self, request: LoadRequest, number: int, timeout: float, cancelled: threading.Event
    ) -> Member:
        """Order all ranks to load their parts of a model. Sets `member`, and returns it."""
        fields = {
            field.name: getattr(request, field.name)
            for field in dataclasses.fields(request)
            if field.name != "adapters"
        }
        self._set_timeout(timeout)
        with self._changed:
            self._load, self._refusal = number, ""
        self.send(wire.LoadShard(number, fields, timeout))

        def agree(value: Value) -> Sequence[Value]:
            ranks = range(1, self.info.size)
            values = [value, *(self._next_report(rank, number, cancelled).value for rank in ranks)]
            self.send(wire.Agreed(number, tuple(values)))
            return values

        self.member = Member(self.info, agree)
        return self.member

    def stages_until_refused(self, stages: Stages[Loaded]) -> Stages[Loaded]:
        """Run the stages of a load until another rank refuses it; then raise ModelRejected."""
        return until_ended(stages, lambda: ModelRejected(self._refusal) if self._refusal else None)

    @property
    def division(self) -> str:
        """Such as `2 ranks, pipeline: rank 0 (10.0.0.1) has layers 12-23 of 24, …`."""
        parts = [
            f"{self.info.name(rank)} has {shard['words']}" for rank, shard in enumerate(self.shards)
        ]
        return f"{len(parts)} ranks, {self.shards[0]['way']}: {', '.join(parts)}"

    def on_all_ranks(
        self, run: Callable[[Sequence[int], Any, int], mx.array]
    ) -> Callable[[Sequence[int], Any, int], mx.array]:
        """Return a function that runs the reference forward pass on all ranks."""

        def everywhere(tokens: Sequence[int], item: Any, prompt: int) -> mx.array:
            import mlx.core as mx

            self.send(Plain(tuple(tokens)))
            logits = run(tokens, item, prompt)
            mx.eval(logits)
            return logits

        return everywhere

    def drop(self) -> None:
        """Order all ranks to drop the model. Raises RankLost."""
        self.shards = ()
        self.send(Signal.DROP)

    def abandon(self, number: int) -> None:
        """End a failed or cancelled load on all ranks."""
        with self._changed:
            self._load, self._refusal = 0, ""
        with contextlib.suppress(EngineError):
            self.send(wire.Abandon(number))

    def ended(self, number: int, fault: Exception) -> Exception:
        """End a load on all ranks after an error, and return the exception to raise.

        This is RankLost if a lost rank has caused the error, because an error of MLX does not
        mention ranks, and otherwise `fault`.
        """
        refused = self._refusal
        self.abandon(number)
        if not refused and isinstance(fault, ModelRejected | EngineFailed):
            self._wait_for_cause()
        return RankLost(self.broken) if self.broken else fault

    def _set_timeout(self, seconds: float) -> None:
        for follower in list(self._followers.values()):
            follower.link.timeout = seconds

    def _next_report(self, rank: int, number: int, cancelled: threading.Event) -> wire.LoadReport:
        reports = self._followers[rank].reports

        def missing() -> str:
            self._require_whole()
            if self._refusal:
                raise ModelRejected(self._refusal)
            while reports and reports[0].number != number:  # for a load that was abandoned
                reports.popleft()
            return "" if reports else self.info.name(rank)

        self._wait_while(missing, cancelled, math.inf)
        return reports.popleft()

    def _wait_while(
        self, missing: Callable[[], str], cancelled: threading.Event, limit: float
    ) -> None:
        """Wait until no rank is missing. Raises Cancelled, and ShuttingDown after `limit` seconds.

        missing: returns the names of the ranks for which to wait; "" if there are none.
        """
        began = reported = time.monotonic()
        with self._changed:
            while names := missing():
                if cancelled.is_set():
                    raise Cancelled("the load was cancelled")
                now = time.monotonic()
                if now - began >= limit:
                    raise ShuttingDown(
                        f"{names} did not join within {limit:g} s: check that every rank is"
                        f" started, reaches rank 0 and has the same token{self._refused}"
                    )
                if now - reported >= _REPORT_SECONDS:
                    reported = now
                    _log.warning("the load waits for %s", names)
                self._changed.wait(_CHECK_SECONDS)

    def _missing(self) -> str:
        missing = (rank for rank in range(1, self.info.size) if rank not in self._followers)
        return ", ".join(map(self.info.name, missing))

    # Plans.

    def fault(self, fault: Exception) -> RankLost:
        """Return the exception to raise for an MLX error, which a lost rank may have caused."""
        self._wait_for_cause()
        return RankLost(self.broken or f"rank 0 failed: {type(fault).__name__}: {fault}")

    def send(self, message: Message) -> None:
        """Send a message to all ranks. Raises RankLost."""
        data = encode(message)
        for rank, follower in list(self._followers.items()):
            self._require_whole()
            try:
                follower.link.send_bytes(data)
            except LinkLost as loss:
                self._lose(rank, follower, str(loss))
        self._require_whole()

    def _wait_for_cause(self) -> None:
        """Wait a moment for a lost connection, because MLX may notice a lost rank earlier."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.broken), _NAME_SECONDS)

    def _require_whole(self) -> None:
        if self.broken:
            raise RankLost(self.broken)

    # Connections.

    def _take(self, connection: socket.socket, host: str) -> None:
        info = self.info
        try:
            join, link = accept(
                connection, self._token, info.size, info.timeout, self._followers.__contains__
            )
        except LinkLost as refusal:
            with self._changed:
                self._refused = f"; rank 0 refused a connection from {host}, which {refusal}"
                self._changed.notify_all()
            _log.warning("refused a connection from %s, which %s", host, refusal)
            return
        rank, follower = join.rank, _Follower(link, join.versions)
        with self._changed:
            joins = rank not in self._followers and not self._formed
            if joins:
                self._followers[rank] = follower
                self._refused = ""
            self._changed.notify_all()
        if not joins:
            _log.warning("refused a second %s, at %s", info.name(rank), host)
            link.close()
            return
        _log.info("%s has joined", info.name(rank))
        threading.Thread(
            target=self._listen_to, args=(rank, follower), name=f"rank-{rank}", daemon=True
        ).start()

    def _listen_to(self, rank: int, follower: _Follower) -> None:
        try:
            while True:
                match follower.link.receive():
                    case wire.LoadReport(number, refusal=why) if why:
                        self._refuse(rank, follower, number, why)
                    case wire.LoadReport() as report:
                        with self._changed:
                            follower.reports.append(report)
                            self._changed.notify_all()
                    case wire.Failed(why):
                        self._lose(rank, follower, f"failed: {why}")
                        return
                    case other:
                        raise LinkLost(f"sent {name_of(other)}, which rank 0 does not expect")
        except LinkLost as loss:
            self._lose(rank, follower, str(loss))
        except Exception as fault:
            _log.error("%s: its messages cannot be read", self.info.name(rank), exc_info=fault)
            self._lose(rank, follower, "sent a message that rank 0 cannot read")

    def _refuse(self, rank: int, follower: _Follower, number: int, why: str) -> None:
        """End a load on all ranks, because one rank has refused it.

        If rank 0 does not end the load in time, because it is waiting in a collective for that
        rank, the rank counts as lost.
        """
        with self._changed:
            if number != self._load or self._refusal:
                return
            self._refusal = f"{self.info.name(rank)}: {why}"
            self._changed.notify_all()

        def overdue() -> None:
            if self._load == number:
                self._lose(rank, follower, f"refused the load while rank 0 computed: {why}")

        after(follower.link.timeout, overdue)

    def _lose(self, rank: int, follower: _Follower, why: str) -> None:
        if self._closing:
            return
        message = f"{self.info.name(rank)} {why}"
        with self._changed:
            if self._formed:
                first, self.broken = not self.broken, self.broken or message
            else:
                first = False
                if self._followers.get(rank) is follower:
                    del self._followers[rank]
                _log.warning("%s", message)
            self._changed.notify_all()
        # The link is closed last; otherwise its reader would report the closed link as the cause.
        follower.link.close()
        if first:
            self._failed(message)


def leader_of(hostfile: str, transport: str) -> Leader:
    """Return the leader for the ranks of a hostfile, in a process that no supervisor has started.

    Sets the environment variables by which MLX finds the other ranks. Must be called on the main
    thread. Raises InvalidRequest. An empty transport means the default.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process if the group does not form
    chosen = transport or os.environ.get("MLX_DISTRIBUTED_BACKEND") or "ring"
    info = info_in(hostfile, 0, chosen, "", os.environ)
    os.environ |= transport_environ(info, hostfile, os.environ)
    return Leader(info, os.environ.get(TOKEN, ""))
