"""A supervisor with a models folder of its own, in the test's process; its backends are real."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.calls import Piece, Stub, generate
from gateway.errors import ApiError
from gateway.models.reading import read_folder
from gateway.settings import GatewaySettings
from gateway.supervisor.instance import ModelStatus, State
from gateway.supervisor.supervisor import Supervisor, WarmPrompts
from tests.gateway.gateway_process import ROOT, WAIT
from wire import backend_pb2 as pb

DEADLY = f'exec "{ROOT}/scripts/python" -m tests.gateway.deadly_backend "$@"'


def write(folder: Path, name: str, settings: Mapping[str, Any]) -> None:
    """A model file; JSON is YAML."""
    (folder / f"{name}.yaml").write_text(json.dumps({"name": name, **settings}))


def script(folder: Path, text: str) -> str:
    """A backend command with a behaviour that a real backend cannot be made to show."""
    path = folder / "run.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@asynccontextmanager
async def supervising(
    folder: Path,
    models: Mapping[str, Mapping[str, Any]],
    warm_prompts: WarmPrompts | None = None,
    **settings: Any,
) -> AsyncIterator[Supervisor]:
    """A started supervisor, which leaves no process at its end."""
    before = children()
    for name, file in models.items():
        write(folder, name, file)
    supervisor = Supervisor(GatewaySettings(folder, **settings), read_folder(folder))
    await supervisor.start(warm_prompts)
    try:
        yield supervisor
    finally:
        await supervisor.stop()
        # A backend that it found running may have started a process of its own.
        new = [process for process in children() if process not in before]
        assert [process for process in new if process.parent() not in before] == []


def children() -> list[psutil.Process]:
    """Every process below the test's process."""
    return psutil.Process().children(recursive=True)


def is_warden(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it has just ended
        return "warden_process.py" in " ".join(process.cmdline())
    return False


def warden() -> psutil.Process:
    """The warden of the only backend."""
    (found,) = (child for child in psutil.Process().children() if is_warden(child))
    return found


def status_of(supervisor: Supervisor, name: str) -> ModelStatus:
    return next(status for status in supervisor.status() if status.name == name)


def process_of(supervisor: Supervisor, name: str) -> psutil.Process:
    pid = status_of(supervisor, name).pid
    assert pid is not None
    return psutil.Process(pid)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until(holds: Callable[[], bool]) -> None:
    """Poll until `holds` returns True, for at most WAIT seconds."""
    async with asyncio.timeout(WAIT):
        while not holds():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.02)


async def until_state(supervisor: Supervisor, name: str, state: State) -> None:
    await until(lambda: status_of(supervisor, name).state is state)


async def answer(stub: Stub, identity: str, question: str = "What is 2+2?") -> str:
    """The text of a greedy answer."""
    request = pb.PredictOptions(
        ModelIdentity=identity,
        Messages=[pb.Message(role="user", content=question)],
        UseTokenizerTemplate=True,
        Tokens=24,
        Metadata={"enable_thinking": "false"},
    )
    text = ""
    async for event in generate(stub, request):
        text += event.content if isinstance(event, Piece) else ""
    return text


async def ask(supervisor: Supervisor, name: str, **choice: str) -> str:
    """One request as a route sends it."""
    async with supervisor.lease(name, **choice) as lease:
        return await answer(lease.stub, lease.identity)


async def refusal(supervisor: Supervisor, name: str, **choice: str) -> ApiError:
    """The error of a request that must be refused."""
    with pytest.raises(ApiError) as raised:
        await ask(supervisor, name, **choice)
    return raised.value
