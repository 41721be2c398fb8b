"""`python -m backend` with a scripted engine, for tests of how the process ends.

The prompt chooses: `die` ends the engine, `stuck` ignores the order to stop, `held` does so in a
process that does not abandon its engine, `print` prints more than a pipe holds. Each except `die`
streams a piece and then blocks for ever.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

from backend import __main__ as entry
from backend.engine import engine as seam
from backend.engine.generation import Generation
from backend.engine.request import GenerationRequest, RawPrompt
from backend.rpc import lifetime
from tests.rpc.fake_engine import FakeEngine, Script


class ScriptedEngine(FakeEngine):
    def __init__(self, leader: None = None) -> None:
        super().__init__()
        self.script = Script(pieces=["a"], hold=True)
        self._cause: asyncio.Future[str] | None = None
        self._stuck = False

    def start(self, before_load: Callable[[], None] = lambda: None) -> None:
        self._cause = asyncio.get_running_loop().create_future()

    def submit(self, request: GenerationRequest) -> Generation:
        assert isinstance(request.prompt, RawPrompt)
        if request.prompt.text == "die" and self._cause is not None:
            self._cause.set_result("the scripted engine was told to die")
        if request.prompt.text == "print":
            print("from a library\n" * 10_000, flush=True)
        if request.prompt.text == "held":
            lifetime._ENGINE_LIMIT = float("inf")
        self._stuck = request.prompt.text in ("stuck", "held")
        return super().submit(request)

    async def stop(self, grace: float) -> None:
        if self._stuck:
            await asyncio.Event().wait()
        await super().stop(grace)

    async def failed(self) -> str:
        assert self._cause is not None
        return await self._cause


if __name__ == "__main__":
    seam.Engine = ScriptedEngine  # type: ignore[misc,assignment]
    os._exit(entry.main(sys.argv[1:], os.environ))
