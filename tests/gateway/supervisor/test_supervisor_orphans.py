"""A gateway that is killed takes its backends with it, whichever program they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.gateway.asking import user_message
from tests.gateway.gateway_process import TINY_TEXT, WAIT, GatewayProcess, roomy, tiny
from tests.gateway.supervising import is_warden, script, until


def ask(gateway: GatewayProcess, model: str) -> None:
    """A request whose answer does not end before the gateway is killed."""
    question = {"model": model, "messages": user_message("2+2")}
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"{gateway.url}/v1/chat/completions", json=question, timeout=WAIT)


@pytest.mark.parametrize("replaced", [False, True], ids=["first wardens", "wardens replaced"])
async def test_a_killed_gateway_leaves_no_backend_behind(tmp_path: Path, replaced: bool) -> None:
    """replaced: whether the wardens are killed before."""
    # Our backend watches its parent; this one watches nothing, ignores SIGTERM, and so does its
    # child.
    careless = script(tmp_path, "trap '' TERM; sleep 1000 & echo $! > child; wait")
    endless = {"model": str(TINY_TEXT), "ignore_eos": True, "max_tokens": 100_000}
    models = {"ours": roomy(parameters=endless), "careless": tiny(backend=careless)}
    gateway, pool = GatewayProcess(models), ThreadPoolExecutor(len(models))
    try:
        asked = [pool.submit(ask, gateway, name) for name in models]
        await until(lambda: "ours: loading" in "".join(gateway.log))
        await until(lambda: (tmp_path / "child").exists())

        def wardens() -> list[psutil.Process]:
            return [w for w in psutil.Process(gateway.child.pid).children() if is_warden(w)]

        first = wardens()
        assert len(first) == len(models)

        def running() -> int:
            """A backend starts its monitor with its first load, so it may exist already."""
            return sum("backend.rpc.monitor" not in command for _, command in gateway.commands())

        # The gateway, two wardens, our backend, and the two that watch nothing. A process that was
        # just forked still has the command line of its parent.
        await until(lambda: running() == 6)
        if replaced:
            for warden in first:
                warden.kill()
            await until(lambda: len(wardens()) == len(models) and not {*first} & {*wardens()})
        gateway.child.kill()
        await until(lambda: gateway.processes() == [])
        for asking in asked:
            asking.result()
    finally:
        for process in gateway.processes():
            process.kill()
        gateway.child.wait(WAIT)
        gateway.client.close()
        pool.shutdown()
