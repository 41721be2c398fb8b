"""Backends start reliably during answers: no state of gRPC reaches a new process.

The loop is uvloop, as in the gateway, because what a fork copies depends on who forks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import uvloop

from gateway.calls import Stub, generate
from gateway.supervisor.process import BackendProcess
from tests.gateway.gateway_process import WAIT, roomy
from tests.gateway.supervising import script, supervising
from wire import backend_pb2 as pb

SPAWNS = 300  # of those that copy gRPC's state, one in ten fails
STREAMS = 4
AT_ONCE = 6  # while one of them starts, the streams would run for nothing


class Talk:
    """An endless answer; `received` is released for each of its pieces."""

    def __init__(self, stub: Stub, identity: str) -> None:
        self.received = asyncio.Semaphore(0)
        self._request = pb.PredictOptions(
            ModelIdentity=identity, Prompt="Count to 60.", Tokens=100_000, IgnoreEOS=True
        )
        self.task = asyncio.ensure_future(self._listen(stub))

    async def _listen(self, stub: Stub) -> None:
        async for _ in generate(stub, self._request):
            self.received.release()

    async def goes_on(self) -> None:
        """Wait for a new piece."""
        while not self.received.locked():
            await self.received.acquire()
        async with asyncio.timeout(WAIT):
            await self.received.acquire()


async def ends(folder: Path) -> Counter[str]:
    """The exit of each of many short-lived backends, started a few at a time beside answers."""
    quick = Path(script(folder, "exit 7"))
    async with (
        supervising(folder, {"tiny": roomy()}) as supervisor,
        supervisor.lease("tiny") as tiny,
    ):
        talks = [Talk(tiny.stub, tiny.identity) for _ in range(STREAMS)]
        ended: Counter[str] = Counter()
        try:
            for _ in range(SPAWNS // AT_ONCE):
                starts = (BackendProcess.start(quick, "quick", {}) for _ in range(AT_ONCE))
                for process in await asyncio.gather(*starts):
                    ended[await process.exited] += 1
            for talk in talks:
                await talk.goes_on()
        finally:
            for talk in talks:
                talk.task.cancel()
            await asyncio.gather(*(talk.task for talk in talks), return_exceptions=True)
        return ended


def test_no_spawn_during_running_answers_fails(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ended = runner.run(ends(tmp_path))
    assert ended == {"the backend ended with exit code 7": SPAWNS}
