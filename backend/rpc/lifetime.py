"""The life of the process: serve until a signal or an engine failure, then shut down in order.

LocalAI sends SIGTERM to the process group at any time, and SIGKILL 15 seconds later. So generations
are cancelled, not awaited, and every step of the shutdown has a time limit. If the engine has
failed or hangs, Health reports it before the calls end, so that the host does not send them to this
process again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

from backend.engine.engine import Engine
from backend.rpc import logs, parent_watch
from backend.rpc.address import Address
from backend.rpc.server import Server
from backend.rpc.watchdog import Watchdog

_ENGINE_GRACE = 5.0
_ENGINE_LIMIT = 6.0  # seconds after which an engine that has not stopped is abandoned
_ANSWER_GRACE = 1.0
_REPORT_SECONDS = 1.0  # seconds during which Status and Health report a failure before calls end
_ECHO = 0.1
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class EngineStopped(Exception):
    """The engine cannot continue; `str()` is the cause."""


async def serve(engine: Engine, address: Address, token: str, ready: Callable[[int], None]) -> None:
    """Serve until a signal arrives. Raises EngineStopped, AddressInUse or UsageError."""
    stop_signal = _on_signals()
    server = Server(engine, token)
    watchdog = Watchdog(engine.heartbeat, engine.fail)
    engine.start(watchdog.start_monitor)
    ready(await server.start(address))
    watching = asyncio.ensure_future(watchdog.watch())
    again = asyncio.ensure_future(server.servicer.load_again())
    failure = asyncio.ensure_future(engine.failed())
    ends: list[asyncio.Future[Any]] = [stop_signal, failure]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    failed = not stop_signal.done()
    again.cancel()
    if not failed:
        logs.info("stopping", signal=signal.Signals(stop_signal.result()).name)
    server.refuse_new(failed=failed)
    try:
        await asyncio.wait_for(engine.stop(0 if failed else _ENGINE_GRACE), _ENGINE_LIMIT)
    except TimeoutError:
        logs.warning("stopping", engine="still busy, abandoned")
    if failed:
        await asyncio.sleep(_REPORT_SECONDS)
    await server.stop(_ANSWER_GRACE)
    if failed:
        raise EngineStopped(failure.result())
    watching.cancel()
    watchdog.close()
    logs.info("stopped")


def _on_signals() -> asyncio.Future[int]:
    """Return a future for the first signal to stop; a second signal ends the process immediately.

    SIGHUP counts as a signal to stop unless it is ignored, as under `nohup`.

    `timeout` and similar programs signal a process and then its group; such a repetition does not
    count as a second signal. Under a supervisor no second signal counts: the supervisor forwards
    the first one, which the group may have received too, and ends this process if the shutdown
    takes too long.
    """
    loop = asyncio.get_running_loop()
    stop_signal: asyncio.Future[int] = loop.create_future()
    echo_until = 0.0
    supervised = parent_watch.PARENT in os.environ

    def receive(number: signal.Signals) -> None:
        nonlocal echo_until
        if not stop_signal.done():
            stop_signal.set_result(number)
            echo_until = loop.time() + _ECHO
            return
        if loop.time() < echo_until or supervised:
            return
        logs.error("exit", cause=f"a second {number.name} asked to stop immediately")
        logs.flush()
        os._exit(128 + number)

    for number in _STOPPING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, receive, number)
    return stop_signal
