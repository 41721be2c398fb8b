"""A gateway that is killed takes its backends with it, whichever program they are."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import psutil

from tests.gateway.gateway_process import WAIT, GatewayProcess, tiny
from tests.gateway.supervising import is_warden, script, until


def ask(gateway: GatewayProcess, model: str) -> None:
    """A request that is never answered."""
    question = {"model": model, "messages": [{"role": "user", "content": "2+2"}]}
    try:
        httpx.post(f"{gateway.url}/v1/chat/completions", json=question, timeout=WAIT)
    except httpx.HTTPError:
        return
    raise AssertionError("a killed gateway has answered")


async def test_a_killed_gateway_leaves_no_backend_behind(tmp_path: Path) -> None:
    # Our backend watches its parent; this one watches nothing, ignores SIGTERM, and so does its
    # child.
    careless = script(tmp_path, "trap '' TERM; sleep 1000 & echo $! > child; wait")
    gateway = GatewayProcess({"ours": tiny(), "careless": tiny(backend=careless)})
    try:
        askers = [
            threading.Thread(target=ask, args=(gateway, name)) for name in ("ours", "careless")
        ]
        for asker in askers:
            asker.start()
        await until(lambda: "ours: loading" in "".join(gateway.log))
        await until(lambda: (tmp_path / "child").exists())
        wardens = psutil.Process(gateway.child.pid).children()
        assert list(map(is_warden, wardens)) == [True, True]

        def running() -> int:
            """A backend starts its monitor with its first load, so it may exist already."""
            commands = [one.cmdline() for one in gateway.processes()]
            return sum("backend.rpc.monitor" not in command for command in commands)

        # The gateway, two wardens, our backend, and the two that watch nothing. A process that was
        # just forked still has the command line of its parent.
        await until(lambda: running() == 6)
        gateway.child.kill()
        await until(lambda: gateway.processes() == [])
        for asker in askers:
            asker.join(WAIT)
    finally:
        for process in gateway.processes():
            process.kill()
        gateway.child.wait(WAIT)
        gateway.client.close()
