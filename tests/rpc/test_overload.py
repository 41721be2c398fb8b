"""How little a request costs that is refused because the queue is full."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest

from backend.engine.errors import Overloaded
from backend.rpc import call_log, servicer, statuses
from backend.rpc.last_load import QUEUED
from tests.rpc.client import failure_of
from tests.rpc.conftest import Running
from tests.rpc.fake_engine import FakeEngine
from tests.rpc.requests_of_hosts import model_options, predict_options
from tests.rpc.test_guards import call, empty_request
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

FULL = Overloaded("the queue is full")
REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")


@pytest.mark.parametrize("method", sorted(QUEUED))
def test_a_full_queue_is_checked_before_any_other_work(
    method: str, running: Running, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servicer is not called, and the host gets no sign that work has begun."""
    engine.full = FULL
    for each in QUEUED:
        owner = next(kind for kind in servicer.Servicer.__mro__ if each in vars(kind))
        monkeypatch.delattr(owner, each)
    with pytest.raises(grpc.RpcError) as caught:
        list(call(running.stub, method, empty_request(method)))
    error: Any = caught.value
    assert (error.code(), error.details()) == REFUSED
    assert error.initial_metadata() == ()
    assert engine.requests == []


@pytest.mark.parametrize("method", ["Health", "Status", "GetMetrics", "TokenizeString"])
def test_calls_that_do_not_queue_are_answered(
    method: str, stub: BackendStub, engine: FakeEngine
) -> None:
    engine.full = FULL
    call(stub, method, empty_request(method))


def test_a_call_for_another_model_is_refused_before_the_full_queue_is_checked(
    stub: BackendStub, engine: FakeEngine
) -> None:
    stub.LoadModel(model_options(Model="org/a"))
    engine.full = FULL
    code, _ = failure_of(lambda: stub.Predict(predict_options(ModelIdentity="org/b")))
    assert code is grpc.StatusCode.NOT_FOUND


def test_the_same_refusal_is_worded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worded: list[str] = []

    def write(message: str) -> str:
        worded.append(message)
        return message

    monkeypatch.setattr(statuses, "message_with_keys", write)
    again = [statuses.status_of(Overloaded("the queue is full: 7")) for _ in range(3)]
    assert {each.message for each in again} == {"the queue is full: 7"}
    assert worded == ["the queue is full: 7"]


def test_many_refusals_are_logged_in_few_lines(
    running: Running,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first is logged like any call; the next line says how many more there were."""
    monkeypatch.setattr(call_log, "_REFUSALS_SECONDS", 3600.0)
    refusals = call_log._Refusals()
    monkeypatch.setattr(call_log, "_refusals", refusals)
    caplog.set_level(logging.INFO, "backend")
    engine.full = FULL
    for _ in range(50):
        assert failure_of(lambda: running.stub.Predict(predict_options())) == REFUSED
    assert running.stub.Health(pb.HealthMessage()).message == b"OK"

    async def end_of_the_second() -> None:
        refusals._log_count()

    running.run(end_of_the_second())
    assert failure_of(lambda: running.stub.Predict(predict_options())) == REFUSED
    running.close_calls()
    lines = [(record.msg, vars(record)["fields"]) for record in caplog.records]
    assert [name for name, _ in lines] == ["call", "overloaded", "call"]
    assert lines[1][1] == {"more_refused": 49}
    assert {fields["status"] for name, fields in lines if name == "call"} == {"RESOURCE_EXHAUSTED"}


async def test_refusals_are_counted_for_a_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_log, "_REFUSALS_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "backend")
    refusals = call_log._Refusals()
    assert [refusals.counted() for _ in range(3)] == [False, True, True]
    outcome = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.01, outcome.set_result, None)
    await outcome
    assert [vars(record)["fields"] for record in caplog.records] == [{"more_refused": 2}]
    assert not refusals.counted()
