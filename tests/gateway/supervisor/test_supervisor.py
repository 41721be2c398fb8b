"""Backends as processes: one per model, monitored, replaced, unloaded, drained."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest
from pydantic import BaseModel

from gateway.asking import ask_once
from gateway.calls import Piece
from gateway.errors import ApiError
from gateway.models.config import ModelConfig
from gateway.supervisor import instance
from gateway.supervisor import supervisor as supervisor_module
from gateway.supervisor.backend import Backend as Served
from gateway.supervisor.instance import State
from gateway.supervisor.supervisor import Lease, Supervisor
from tests.acceptance.backend import Backend
from tests.gateway import requests_begun
from tests.gateway.gateway_process import ROOT, TINY_TEXT, WAIT, tiny
from tests.gateway.numbers_backend import NumbersBackend
from tests.gateway.supervising import (
    answer,
    ask,
    has_ended,
    process_of,
    refusal,
    status_of,
    supervising,
    until,
    until_state,
    write,
)
from tests.tasks import begun
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc

TINY_DRAFT = ROOT / "tests" / "models" / "tiny_draft"


class Named(BaseModel):
    """A request, reduced to a name."""

    name: str


async def test_first_requests_share_a_load_and_a_crash_fails_only_running_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path, {"tiny": tiny(aliases=["other"])}) as supervisor:
        assert status_of(supervisor, "tiny").state is State.STOPPED
        requests = [
            asyncio.create_task(ask(supervisor, name)) for name in ("tiny", "other", "tiny")
        ]
        await until_state(supervisor, "tiny", State.LOADING)
        assert status_of(supervisor, "tiny").leases == 3
        first = process_of(supervisor, "tiny")
        requests.pop(0).cancel()  # the client of the first request disconnects, which ends nothing
        answers = await asyncio.gather(*requests)
        assert len(set(answers)) == 1
        assert answers[0]
        ready = status_of(supervisor, "tiny")
        assert (ready.state, ready.pid, ready.leases) == (State.READY, first.pid, 0)
        assert ready.memory_bytes > 0

        # No other program on the machine can use the socket.
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ready.port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await backend_pb2_grpc.BackendStub(channel).Health(pb.HealthMessage())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

        first.send_signal(signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(first.pid))  # its exit status has been collected
        assert await ask(supervisor, "tiny") == answers[0]
        second = process_of(supervisor, "tiny")
        assert second.pid != first.pid
        assert status_of(supervisor, "tiny").restarts == 1

        # A suspended backend is killed.
        monkeypatch.setattr(instance, "_POLL", 0.05)
        monkeypatch.setattr(instance, "_HEALTH_LIMIT", 0.5)
        second.send_signal(signal.SIGSTOP)
        await until(lambda: status_of(supervisor, "tiny").pid is None)
        assert has_ended(second)
        failed = status_of(supervisor, "tiny")
        assert failed.error == "the backend did not answer Health 3 times"
        assert failed.state in (State.BACKING_OFF, State.FAILED)  # depends on the clock


async def test_a_slot_for_a_model_is_given_to_the_requested_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    # A run.sh elsewhere is not recognised as this backend, so the gateway passes it a port.
    stranger = tmp_path / "elsewhere" / "run.sh"
    stranger.symlink_to(ROOT / "run.sh")
    models = {
        "one": tiny(draft_models=[str(TINY_DRAFT)]),
        "two": tiny(backend=str(stranger), idle_unload=0.2),
    }
    async with supervising(tmp_path, models, max_loaded_models=1) as supervisor:
        text = await ask(supervisor, "one", draft_model=str(TINY_DRAFT))
        drafting = f"one+{TINY_DRAFT}"
        first = process_of(supervisor, drafting)
        assert status_of(supervisor, "one").state is State.STOPPED

        async with supervisor.lease("two"):
            assert has_ended(first)
            assert status_of(supervisor, drafting).state is State.STOPPED
            waiting = asyncio.ensure_future(ask(supervisor, "one"))
            second = process_of(supervisor, "two")
            assert await ask(supervisor, "two") == text
            assert status_of(supervisor, "one").state is State.STOPPED
            assert not waiting.done()
        assert await waiting == text
        await until(lambda: has_ended(second))
        assert await ask(supervisor, "two") == text
        second = process_of(supervisor, "two")

        await until(lambda: has_ended(second))  # no request uses it any more
        await until_state(supervisor, "two", State.STOPPED)
        requests_begun.begun(strict=True)
        error = await refusal(supervisor, "one", draft_model="/etc/passwd")
        assert (error.status, error.param) == (400, "draft_model")
        # Cline and Roo Code send a draft model of LM Studio's; it is ignored: it changes no answer.
        lenient = requests_begun.begun()
        assert await ask(supervisor, "one", draft_model="/etc/passwd") == text
        assert lenient.ignored == {"draft_model": None}


async def test_a_suspect_backend_is_checked_and_kept_if_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path, {"tiny": tiny()}) as supervisor:
        async with supervisor.lease("tiny") as lease:
            process = process_of(supervisor, "tiny")
            lease.backend.doubt(emptied=False)
        async with supervisor.lease("tiny"):
            assert process_of(supervisor, "tiny") == process
        process.suspend()  # its sockets are open, and it is alive
        monkeypatch.setattr(instance, "_HEALTH_LIMIT", 2.0)
        async with supervisor.lease("tiny") as lease:
            lease.backend.doubt(emptied=False)
        async with supervisor.lease("tiny"):
            assert process_of(supervisor, "tiny") != process
        assert has_ended(process)


async def test_memory_is_limited_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor_module, "device_memory", lambda: 1000 << 20)
    models = {name: tiny(memory_mib=600) for name in ("one", "two", "three")}
    # A loaded model counts with what its backend reports, which is little.
    monkeypatch.setattr(Served, "memory", _measured)
    with caplog.at_level("INFO", "gateway.supervisor"):
        async with supervising(tmp_path, models) as supervisor:
            assert "may use 1000 MiB together" in caplog.text
            await ask(supervisor, "one")
            async with supervisor.lease("two"):
                assert status_of(supervisor, "one").state is State.STOPPED
                waiting = await begun(ask(supervisor, "three"))
                await supervisor.load("two")
                assert not waiting.done()
                assert status_of(supervisor, "two").state is State.READY
            assert await waiting
            assert status_of(supervisor, "two").state is State.STOPPED
        far = NumbersBackend()
        elsewhere = {"far": {"parameters": {"model": "numbers"}, "address": far.address}}
        async with supervising(tmp_path, models | elsewhere) as supervisor:
            await supervisor.load("far")
            await supervisor.load("one")
            assert status_of(supervisor, "far").state is State.READY
        far.close()
        async with supervising(tmp_path, models, max_memory_bytes=0) as supervisor:
            await ask(supervisor, "one")
            await ask(supervisor, "two")
            assert status_of(supervisor, "one").state is State.READY


@pytest.mark.parametrize(("reported", "size"), [("0", 9), ("9" * 5000, 9), ("-5", 9), ("77", 77)])
async def test_a_backends_context_counts_if_it_can_be_one(
    tmp_path: Path, reported: str, size: int
) -> None:
    far = NumbersBackend()
    far.context_size = reported
    model = {"parameters": {"model": "m"}, "address": far.address, "context_size": 9}
    async with supervising(tmp_path, {"far": model}) as supervisor:
        await supervisor.load("far")
        assert supervisor.context_size(supervisor.resolve("far")) == size
    far.close()


async def _measured(_backend: Served, _limit: float) -> int:
    return 600 << 20


async def test_no_request_waits_for_the_slot_of_a_pinned_model(tmp_path: Path) -> None:
    models = {"one": tiny(), "two": tiny(pinned=True)}
    async with supervising(tmp_path, models, max_loaded_models=1) as supervisor:
        async with supervisor.lease("two"):
            pass
        error = await refusal(supervisor, "one")
        assert (error.status, error.code, error.retry_after) == (503, "no_room", 2)
        assert status_of(supervisor, "one").state is State.STOPPED


async def test_a_changed_file_and_a_shutdown_wait_for_running_requests(tmp_path: Path) -> None:
    async with supervising(tmp_path, {"tiny": tiny()}) as supervisor:
        async with supervisor.lease("tiny") as lease:
            process = process_of(supervisor, "tiny")
            with pytest.raises(ApiError, match="in use"):
                await supervisor.unload("tiny")
            write(tmp_path, "tiny", tiny(context_size=512))
            (tmp_path / "broken.yaml").write_text("name: broken\nparametres: {}")
            signal.raise_signal(signal.SIGHUP)
            await until(lambda: supervisor.resolve("tiny").context_size == 512)
            assert lease.config.context_size == 1024
            assert not has_ended(process)
            assert (await refusal(supervisor, "broken")).status == 500
            assert status_of(supervisor, "broken").state is State.BROKEN
        await until(lambda: has_ended(process))
        write(tmp_path, "tiny", tiny())
        supervisor.reload()

        async with supervisor.lease("tiny"):
            process = process_of(supervisor, "tiny")
            stopping = await begun(supervisor.stop(WAIT))
            error = await refusal(supervisor, "tiny")
            assert (error.status, error.code) == (503, "stopping")
            assert not has_ended(process)
            assert not stopping.done()
        await stopping
        assert has_ended(process)


async def test_a_backend_at_an_address_is_used_and_not_stopped(tmp_path: Path) -> None:
    running = await asyncio.to_thread(Backend)
    try:
        model = {"address": f"127.0.0.1:{running.port}", "parameters": {"model": str(TINY_TEXT)}}
        async with supervising(tmp_path, {"tiny": model}) as supervisor:
            assert await ask(supervisor, "tiny")
            status = status_of(supervisor, "tiny")
            assert (status.state, status.pid) == (State.READY, None)
            running.stub.Free(pb.HealthMessage())  # by its owner, who does not notify the gateway
            assert await _ask_with_retry(supervisor, "tiny")
            other = pb.ModelOptions(Model=str(TINY_DRAFT), ModelFile=str(TINY_DRAFT))
            assert running.stub.LoadModel(other).success  # another host's choice
            assert await _ask_with_retry(supervisor, "tiny")
            await supervisor.unload("tiny")
            assert status_of(supervisor, "tiny").state is State.STOPPED
            uninitialized = pb.StatusResponse.UNINITIALIZED
            await until(lambda: running.stub.Status(pb.HealthMessage()).state == uninitialized)
        assert running.child.poll() is None
    finally:
        assert await asyncio.to_thread(running.close) == 0


async def test_models_at_one_address_take_turns(tmp_path: Path) -> None:
    running = await asyncio.to_thread(Backend)
    try:
        address = {"address": f"127.0.0.1:{running.port}"}
        models = {"one": tiny(**address), "two": tiny(**address, context_size=512)}
        async with supervising(tmp_path, models) as supervisor:
            text = await ask(supervisor, "one")
            async with supervisor.lease("one") as lease:
                waiting = await begun(ask(supervisor, "two"))
                assert await answer(lease.stub, lease.identity) == text
                assert not waiting.done()
            assert await waiting == text
            assert status_of(supervisor, "one").state is State.STOPPED
            assert await ask(supervisor, "one") == text
            assert status_of(supervisor, "two").state is State.STOPPED
    finally:
        assert await asyncio.to_thread(running.close) == 0


async def _ask_with_retry(supervisor: Supervisor, name: str) -> str:
    """Lease and ask like a route, a second time if the backend has lost its model."""

    async def text(lease: Lease) -> str:
        return await answer(lease.stub, lease.identity)

    while True:
        try:
            return await ask_once(lambda: supervisor.lease(name), text, Named(name=name))
        except ApiError as error:  # the second loss in a row causes a pause
            if error.code != "model_backing_off":
                raise
            await asyncio.sleep(error.retry_after or 0)


async def test_a_request_interrupts_the_reading_of_a_warm_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read again once no model is used; a prompt that fails is not."""
    begun_at: list[str] = []
    ended: list[str] = []
    go_on = asyncio.Event()

    async def held(_stub: object, options: pb.PredictOptions) -> AsyncIterator[Piece]:
        begun_at.append(options.Prompt)
        try:
            if options.Prompt == "bad":
                raise ApiError(400, "no")
            await go_on.wait()
            ended.append(options.Prompt)
        finally:
            begun_at.append("left")
        yield Piece()

    async def prompts(_config: ModelConfig) -> list[pb.PredictOptions]:
        return [pb.PredictOptions(Prompt=text) for text in ("bad", "good")]

    monkeypatch.setattr(supervisor_module, "generate", held)
    monkeypatch.setattr(supervisor_module, "_TICK", 0.01)
    async with supervising(tmp_path, {"tiny": tiny(), "other": tiny()}, prompts) as supervisor:
        await supervisor.load("tiny")
        await until(lambda: begun_at[:3] == ["bad", "left", "good"])
        assert status_of(supervisor, "tiny").leases == 0
        async with supervisor.lease("other"):
            await until(lambda: begun_at == ["bad", "left", "good", "left"])
            assert ended == []
        await until(lambda: begun_at[4:] == ["good"])
        go_on.set()
        await until(lambda: ended.count("good") == 2)
    assert begun_at.count("bad") == 1
