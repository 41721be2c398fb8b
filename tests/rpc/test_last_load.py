"""Which model ranks that are started again load: the one that was served when they ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from backend.engine.errors import ModelRejected
from backend.engine.load_request import LoadRequest
from backend.engine.ranks.rank_info import LAST_LOAD
from backend.engine.served_model import ServedModel
from backend.rpc.last_load import LastLoad
from backend.rpc.servicer import Servicer
from tests.rpc.fake_engine import SERVED, FakeEngine
from tests.tasks import begun
from wire import backend_pb2 as pb

# The context of a call that is made without a socket.
CONTEXT: Any = SimpleNamespace(set_trailing_metadata=lambda _: None)


class DroppingEngine(FakeEngine):
    """An engine whose loads first drop the current model, as they do with ranks.

    still_served: what is served when the load fails; "current" if it is refused before that.
    """

    still_served: ServedModel | Literal["current"] | None = "current"

    async def load(self, request: LoadRequest) -> ServedModel:
        if self.load_fault is None:
            return await super().load(request)
        if self.still_served != "current":
            self.served = self.still_served
        raise self.load_fault


@pytest.mark.parametrize(
    ("fault", "still_served", "remembered"),
    [
        (ModelRejected("its disk is on fire"), None, None),
        (ModelRejected("its options are wrong"), "current", "first"),
        (asyncio.CancelledError(), replace(SERVED), "second"),  # just before the end
    ],
)
def test_ranks_load_again_what_was_served(
    fault: BaseException,
    still_served: ServedModel | Literal["current"] | None,
    remembered: str | None,
    tmp_path: Path,
) -> None:
    engine = DroppingEngine(None)
    last_load = LastLoad({LAST_LOAD: str(tmp_path / "last_load")})
    servicer = Servicer(engine, last_load)

    async def load(model: str) -> None:
        await servicer.LoadModel(pb.ModelOptions(Model=model), CONTEXT)

    asyncio.run(load("first"))
    engine.still_served, engine.load_fault = still_served, fault
    with pytest.raises(type(fault)):
        asyncio.run(load("second"))
    request = last_load.request()
    assert (request and request.Model) == remembered


class WaitingEngine(FakeEngine):
    """A load ends once it may, and `free` waits for it; a load of a model named `bad` fails."""

    def __init__(self) -> None:
        super().__init__(None)
        self.may_end = asyncio.Event()
        self._slot = asyncio.Lock()

    async def load(self, request: LoadRequest) -> ServedModel:
        async with self._slot:
            await self.may_end.wait()
            if request.model == "bad":
                raise ModelRejected("it is bad")
            return await super().load(request)

    async def free(self) -> bool:
        async with self._slot:
            return await super().free()


async def test_a_load_that_fails_after_another_is_not_remembered(tmp_path: Path) -> None:
    """Both had come before any model was loaded."""
    engine, last_load = WaitingEngine(), LastLoad({LAST_LOAD: str(tmp_path / "last_load")})
    servicer = Servicer(engine, last_load)
    loads = [
        await begun(servicer.LoadModel(pb.ModelOptions(Model=name), CONTEXT))
        for name in ("good", "bad")
    ]
    engine.may_end.set()
    assert (await loads[0]).success
    with pytest.raises(ModelRejected):
        await loads[1]
    request = last_load.request()
    assert request is not None
    assert request.Model == "good"


async def test_a_model_that_is_freed_while_it_is_loaded_is_not_remembered(tmp_path: Path) -> None:
    engine, last_load = WaitingEngine(), LastLoad({LAST_LOAD: str(tmp_path / "last_load")})
    servicer = Servicer(engine, last_load)
    load = await begun(servicer.LoadModel(pb.ModelOptions(Model="good"), CONTEXT))
    free = await begun(servicer.Free(pb.HealthMessage(), CONTEXT))
    engine.may_end.set()
    await asyncio.wait([load, free])
    assert engine.loaded is None
    assert last_load.request() is None


def test_a_load_succeeds_although_it_cannot_be_stored(tmp_path: Path) -> None:
    """A folder for temporary files is tidied now and then; something else may have its name."""
    folder = tmp_path / "ranks"
    last_load = LastLoad({LAST_LOAD: str(folder / "last_load")})
    servicer = Servicer(FakeEngine(None), last_load)

    async def load() -> pb.Result:
        return await servicer.LoadModel(pb.ModelOptions(Model="m"), CONTEXT)

    assert asyncio.run(load()).success
    stored = last_load.request()
    assert stored is not None
    assert stored.Model == "m"
    (folder / "last_load").unlink()
    folder.rmdir()
    folder.write_bytes(b"")
    assert asyncio.run(load()).success
    last_load.forget()
