"""Backends that do not start, and models that do not load: reported immediately, in a sentence."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
from pathlib import Path

import psutil
import pytest

from common.version import VERSION
from gateway.supervisor import process
from gateway.supervisor.instance import State
from tests.gateway.gateway_process import tiny
from tests.gateway.supervising import (
    children,
    has_ended,
    refusal,
    script,
    status_of,
    supervising,
    until,
    until_state,
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("echo one >&2; echo 'no licence for /opt/thing/x' >&2; exit 3", "3: no licence for …/x"),
        ("exit 0", "exit code 0"),
    ],
)
async def test_an_early_exit_is_explained_by_the_last_line(
    tmp_path: Path, text: str, sentence: str
) -> None:
    models = {"tiny": tiny(backend=script(tmp_path, text))}
    async with supervising(tmp_path, models) as supervisor:
        error = await refusal(supervisor, "tiny")
        assert (error.status, error.code, error.retry_after) == (500, "model_load_failed", None)
        assert error.message.endswith(sentence)
        assert status_of(supervisor, "tiny").state is State.FAILED


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("nowhere.sh", "…/nowhere.sh: No such file or directory"),
        ("nowhere/run.sh", "…/nowhere: No such file or directory"),
        ("plain.txt", "…/plain.txt: Permission denied"),
        ("empty.sh", "…/empty.sh: Exec format error"),
        ("no\0thing", "embedded null byte"),
    ],
)
async def test_a_command_that_cannot_be_started_is_reported(
    tmp_path: Path, command: str, sentence: str
) -> None:
    (tmp_path / "plain.txt").touch(0o644)
    (tmp_path / "empty.sh").touch(0o755)
    models = {"tiny": tiny(backend=str(tmp_path / command))}
    async with supervising(tmp_path, models) as supervisor:
        error = await refusal(supervisor, "tiny")
        assert error.status == 500
        assert error.message.endswith(f"no process could be started: {sentence}")


@pytest.mark.parametrize("foreign", [False, True])
async def test_a_process_that_may_not_open_files_is_reported(tmp_path: Path, foreign: bool) -> None:
    models = {"tiny": tiny(**({"backend": script(tmp_path, "exit 0")} if foreign else {}))}
    before = children()
    async with supervising(tmp_path, models) as supervisor:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The limit applies to the whole process: garbage of other tests, such as temporary folders,
        # may open files when it is collected.
        gc.collect()
        gc.disable()
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            error = await refusal(supervisor, "tiny")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            gc.enable()
        assert error.message.endswith("no process could be started: Too many open files")
        assert backends(before) == []


async def test_a_backend_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files were replaced while the gateway was running."""
    monkeypatch.setattr(process, "VERSION", "0.0.1")
    async with supervising(tmp_path, {"tiny": tiny()}) as supervisor:
        error = await refusal(supervisor, "tiny")
    assert (error.status, error.code) == (500, "model_load_failed")
    assert f"version {VERSION} has been installed while this gateway, of version 0.0.1," in str(
        error
    )
    assert str(error).endswith("restart the gateway")


async def test_failures_in_a_row_cause_a_pause(tmp_path: Path) -> None:
    models = {"tiny": tiny(backend=script(tmp_path, "echo broken >&2; exit 1"))}
    before = children()
    async with supervising(tmp_path, models) as supervisor:
        codes = [(await refusal(supervisor, "tiny")).code for _ in range(2)]
        assert codes == ["model_load_failed", "model_load_failed"]
        # Each attempt doubles the pause, so that even a slow machine notices one.
        while (error := await refusal(supervisor, "tiny")).code != "model_backing_off":
            assert error.code == "model_load_failed"
        assert error.status == 503
        assert error.retry_after is not None
        assert error.retry_after >= 1
        assert "broken" in error.message
        assert backends(before) == []


def backends(before: list[psutil.Process]) -> list[psutil.Process]:
    """The processes below the test's that did not exist before, with their wardens."""
    return [child for child in children() if child not in before]


async def test_a_models_refusal_is_the_backends_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = {"nowhere": {"parameters": {"model": "nowhere"}, "preload": True}}
    async with supervising(tmp_path, models) as supervisor:
        # preloading does not end the gateway
        await until_state(supervisor, "nowhere", State.FAILED)
        assert supervisor._preloads is not None
        await supervisor._preloads
        errors = [each.message for each in caplog.records if each.levelname == "ERROR"]
        assert len(errors) == 1, "the reason is logged once"
        error = await refusal(supervisor, "nowhere")
        assert error.status == 500
        assert "'nowhere' is neither a folder here nor a hub repository" in error.message
        assert (await refusal(supervisor, "never heard of")).status == 404


async def test_a_backend_that_does_not_answer_is_killed_with_its_children(tmp_path: Path) -> None:
    deaf = "trap '' TERM; sleep 1000 & echo $! > child; wait; wait"
    models = {"tiny": tiny(backend=script(tmp_path, deaf))}
    async with supervising(tmp_path, models, load_timeout=2.0) as supervisor:
        child = tmp_path / "child"
        # If the load times out before the shell has written the file, try again.
        while not child.exists() or not child.read_text():
            error = await refusal(supervisor, "tiny")
            assert "it took longer than 2 s" in error.message
        grandchild = int(child.read_text())
        await until(
            lambda: not psutil.pid_exists(grandchild) or has_ended(psutil.Process(grandchild))
        )


async def test_an_address_without_a_backend_is_reported(tmp_path: Path) -> None:
    models = {"tiny": tiny(address="127.0.0.1:1")}
    async with supervising(tmp_path, models) as supervisor:
        assert "does not answer Health" in (await refusal(supervisor, "tiny")).message


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13])
async def test_a_shutdown_during_a_spawn_leaves_nothing(tmp_path: Path, turns: int) -> None:
    models = {"tiny": tiny(backend=script(tmp_path, "sleep 1000"))}
    before = children()
    async with supervising(tmp_path, models) as supervisor:
        request = asyncio.create_task(supervisor.load("tiny"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await supervisor.stop()
        await asyncio.gather(request, return_exceptions=True)
        assert backends(before) == []
        assert status_of(supervisor, "tiny").state is State.STOPPED


async def test_loads_and_unloads_leak_nothing(tmp_path: Path) -> None:
    missing = {f"nowhere{number}": {"parameters": {"model": "nowhere"}} for number in range(4)}
    before = children()
    async with supervising(tmp_path, {"tiny": tiny(), **missing}) as supervisor:

        async def cycle() -> None:
            await supervisor.load("tiny")
            await supervisor.unload("tiny")

        await cycle()
        await refusal(supervisor, "nowhere0")  # gRPC opens sockets that it keeps open
        me = psutil.Process()
        files, tasks = me.num_fds(), len(asyncio.all_tasks())
        await cycle()
        for name in missing:
            await refusal(supervisor, name)
        await until(lambda: me.num_fds() <= files and len(asyncio.all_tasks()) <= tasks)
        assert backends(before) == []


async def test_a_model_that_cannot_fit_is_not_started(tmp_path: Path) -> None:
    models = {"large": tiny(memory_mib=5000)}
    async with supervising(tmp_path, models, max_memory_bytes=1 << 30) as supervisor:
        error = await refusal(supervisor, "large")
        assert (error.status, error.code) == (500, "no_room")
        assert "about 5000 MiB" in error.message
        assert status_of(supervisor, "large").state is State.STOPPED


async def test_the_children_of_a_backend_end_with_it(tmp_path: Path) -> None:
    models = {"tiny": tiny(backend=script(tmp_path, "sleep 1000 & echo $! > child; exit 3"))}
    async with supervising(tmp_path, models) as supervisor:
        await refusal(supervisor, "tiny")
        left = int((tmp_path / "child").read_text())
        await until(lambda: not psutil.pid_exists(left) or has_ended(psutil.Process(left)))
