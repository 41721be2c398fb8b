"""Any number of simultaneous calls: each is served or refused."""

from __future__ import annotations

from collections import Counter

import grpc
import pytest

from tests.acceptance.backend import Backend, chat
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

CALLS = 2000
SHORT = chat("Hello!", Tokens=2)


@pytest.mark.parametrize("channels", [1, 20])
def test_a_burst_ends_as_served_or_refused(channels: int, served: Backend) -> None:
    opened = [served.connect() for _ in range(channels)]
    stubs = [BackendStub(channel) for channel in opened]
    for stub in stubs:
        stub.Health(pb.HealthMessage(), wait_for_ready=True, timeout=240)
    futures = [stubs[n % channels].Predict.future(SHORT, timeout=300) for n in range(CALLS)]
    codes = Counter(future.code() for future in futures)
    for channel in opened:
        channel.close()
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert codes[grpc.StatusCode.OK] > 0
    served.stub.Predict(SHORT, timeout=240)
