"""Runs a rank other than 0, which loads its part of a model and carries out the plans of rank 0.

Such a rank makes no decisions and receives no requests. Its main thread is the engine thread.
Another thread reads the connection to rank 0, because a collective of MLX may block the main thread
for ever. If the connection ends, the process ends, because MLX can form only one group per process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from backend.engine.errors import Cancelled, EngineError
from backend.engine.load_request import LoadRequest
from backend.engine.loading.stages import Stages
from backend.engine.ranks import wire
from backend.engine.ranks.fingerprint import versions
from backend.engine.ranks.link import Link, LinkLost, after, connect
from backend.engine.ranks.member import Member, Value
from backend.engine.ranks.rank_info import RankInfo
from backend.engine.ranks.wire import Message, Signal, name_of

if TYPE_CHECKING:
    from backend.engine.ranks.followed_model import FollowedModel

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.25
_REFUSED_SECONDS = 2.0  # rank 0 logs each refusal
_REPORT_SECONDS = 5.0
STOPPED, FAILED = 0, 1


def follow(info: RankInfo, token: str, end: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """Carry out the messages of rank 0 until rank 0 ends.

    token: the secret that all ranks share.
    end: ends the process with an exit code, even if threads are blocked.
    """
    # MLX is imported now, because JOIN must be carried out immediately.
    import backend.engine.ranks.group  # noqa: F401

    link = _connected(info, token)
    follower = _Follower(info, link)

    def listen() -> None:
        try:
            while (message := link.receive()) is not Signal.STOP:
                follower.receive(message, lambda: end(FAILED))
            end(STOPPED)
        except LinkLost as loss:
            _log.error("%s %s, so %s ends", info.name(0), loss, info.name(info.rank))
        except Exception as fault:
            _log.error("%s failed", info.name(info.rank), exc_info=fault)
        end(FAILED)

    threading.Thread(target=listen, name="rank-link", daemon=True).start()
    try:
        follower.run()
    except Exception as fault:
        why = str(fault) if isinstance(fault, EngineError) else f"{type(fault).__name__}: {fault}"
        _log.error("%s failed", info.name(info.rank), exc_info=fault)
        with contextlib.suppress(LinkLost):
            link.send(wire.Failed(why))
    end(FAILED)


def _connected(info: RankInfo, token: str) -> Link:
    reported = time.monotonic() - _REPORT_SECONDS
    host, port = info.control
    while True:
        try:
            join = wire.Join(info.rank, info.size, versions())
            return connect(info.control, token, join, info.timeout)
        except (OSError, LinkLost) as fault:
            refused = isinstance(fault, LinkLost)
            why = str(fault) if refused else "cannot be reached"
            if time.monotonic() - reported >= _REPORT_SECONDS:
                reported = time.monotonic()
                _log.warning("rank 0 at %s:%d %s; trying again", host, port, why)
        time.sleep(_REFUSED_SECONDS if refused else _RETRY_SECONDS)


class _Follower:
    def __init__(self, info: RankInfo, link: Link) -> None:
        self._info = info
        self._link = link
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._model: FollowedModel | None = None
        self._number = 0  # the number of the latest load
        # Loads that still run on this rank, by number. An event is set when rank 0 ends its load.
        self._loads: dict[int, threading.Event] = {}

    def run(self) -> None:
        while True:
            self._obey(self._inbox.get())

    def receive(self, message: Message, end: Callable[[], None]) -> None:
        """Handle a message on the thread that reads the connection.

        A load that rank 0 has ended stops before its next stage. If the load does not stop in time,
        because it is waiting in a collective for rank 0, the process ends.

        end: ends the process.
        """
        match message:
            case Signal.JOIN:
                self._link.timeout = max(self._link.timeout, self._info.timeout)
            case wire.LoadShard(number, timeout=timeout):
                self._link.timeout = timeout
                self._loads[number] = threading.Event()
            case wire.Abandon(number) if number in self._loads:
                self._loads[number].set()
                after(self._link.timeout, lambda: end() if number in self._loads else None)
        self._inbox.put(message)

    def _obey(self, message: Message) -> None:
        match message:
            case Signal.JOIN:
                from backend.engine.ranks.group import join_group

                join_group(self._info)
            case wire.LoadShard():
                self._load(message)
            case Signal.DROP:
                self._drop()
            case wire.Abandon(number):
                if number == self._number:
                    self._drop()
            case wire.Agreed():
                pass  # for a load that has already ended on this rank
            case Signal.OPEN | wire.Add() | wire.Step() | Signal.CLEAR | wire.Plain():
                assert self._model is not None, "rank 0 uses only what is loaded"
                self._model.obey(message)
            case other:
                raise LinkLost(f"sent {name_of(other)}, which this rank does not expect")

    def _load(self, order: wire.LoadShard) -> None:
        from backend.engine.ranks.followed_model import load_followed

        self._drop()
        self._number = order.number
        abandoned = self._loads[order.number]

        def agree(value: Value) -> Sequence[Value]:
            self._link.send(wire.LoadReport(order.number, value))
            while True:
                match self._inbox.get():
                    case wire.Agreed(number, values) if number == order.number:
                        return values
                    case wire.Abandon(number) if number == order.number:
                        raise Cancelled("the load has ended on another rank")

        request, member = LoadRequest(**order.request), Member(self._info, agree)
        try:
            stages = load_followed(request, order.number, member, abandoned)
            self._model = _loaded(stages, abandoned)
        except Cancelled:
            self._drop()
        except EngineError as refusal:
            self._drop()
            self._link.send(wire.LoadReport(order.number, refusal=str(refusal)))
        finally:
            del self._loads[order.number]

    def _drop(self) -> None:
        if self._model is not None:
            self._model = None
            from backend.engine.device import release_memory

            release_memory()


def _loaded(stages: Stages[FollowedModel], abandoned: threading.Event) -> FollowedModel:
    """Run the stages of a load, and return the model. Raises Cancelled if rank 0 ends the load."""
    with contextlib.closing(stages):
        while not abandoned.is_set():
            try:
                next(stages)
            except StopIteration as end:
                model: FollowedModel = end.value
                return model
    raise Cancelled("the load has ended on another rank")
