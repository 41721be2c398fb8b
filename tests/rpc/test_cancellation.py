"""However a client disconnects, the engine is notified immediately."""

from __future__ import annotations

import grpc
import pytest

from tests.rpc.client import failure_of
from tests.rpc.conftest import WAIT, Running
from tests.rpc.fake_engine import FakeEngine, Script
from tests.rpc.requests_of_hosts import predict_options
from wire.backend_pb2_grpc import BackendStub


@pytest.fixture(autouse=True)
def _endless(engine: FakeEngine) -> None:
    engine.script = Script(["a"], hold=True)


def test_a_cancelled_unary_call_is_cancelled_in_the_engine(
    stub: BackendStub, engine: FakeEngine
) -> None:
    call = stub.Predict.future(predict_options())
    assert engine.holding.wait(WAIT)
    call.cancel()
    assert engine.left.wait(WAIT)


def test_a_cancelled_stream_is_cancelled_in_the_engine(
    stub: BackendStub, engine: FakeEngine
) -> None:
    stream = stub.PredictStream(predict_options())
    next(stream)
    stream.cancel()
    assert engine.left.wait(WAIT)


def test_a_disconnect_cancels_in_the_engine(running: Running, engine: FakeEngine) -> None:
    channel = grpc.insecure_channel(f"127.0.0.1:{running.port}")
    next(BackendStub(channel).PredictStream(predict_options()))
    channel.close()
    assert engine.left.wait(WAIT)


@pytest.mark.parametrize("method", ["Predict", "PredictStream"])
def test_a_deadline_cancels_in_the_engine(
    stub: BackendStub, engine: FakeEngine, method: str
) -> None:
    while not engine.left.is_set():  # the deadline may pass before the call arrives
        failure = failure_of(lambda: getattr(stub, method)(predict_options(), timeout=0.5))
        assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_client_that_stopped_reading_can_still_cancel(
    stub: BackendStub, engine: FakeEngine
) -> None:
    """The servicer is then blocked in a write, not in the engine."""
    engine.script = Script(["x" * 1_000_000] * 200)
    stream = stub.PredictStream(predict_options())
    next(stream)
    assert not engine.left.is_set()
    stream.cancel()
    assert engine.left.wait(WAIT)
    assert engine.running == []


def test_a_thousand_cancelled_calls_leave_nothing_behind(
    stub: BackendStub, engine: FakeEngine
) -> None:
    for _ in range(1000):
        engine.left.clear()
        stream = stub.PredictStream(predict_options())
        next(stream)
        stream.cancel()
        assert engine.left.wait(WAIT)
    assert engine.running == []
