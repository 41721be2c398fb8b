"""An answer's trailing metadata, read by a client of the real process."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tests.acceptance.backend import WAIT, Backend, chat
from wire import backend_pb2 as pb

FINISH, CACHED, STOP = "mlx-finish-reason", "mlx-cached-tokens", "mlx-stop-sequence-bin"
THOUGHT = "mlx-reasoning-tokens"


def _trailers(backend: Backend, request: pb.PredictOptions) -> list[dict[str, str | bytes]]:
    """The trailing metadata of the unary call and of the stream."""
    _, unary = backend.stub.Predict.with_call(request, timeout=WAIT)
    stream = backend.stub.PredictStream(request, timeout=WAIT)
    list(stream)
    return [dict(call.trailing_metadata()) for call in (unary, stream)]


def test_it_has_the_finish_reason(served: Backend) -> None:
    for trailers in _trailers(served, chat("Count to 5.")):
        assert trailers[FINISH] == "stop"
        assert STOP not in trailers
    for trailers in _trailers(served, chat("Count to 5.", Tokens=2)):
        assert trailers[FINISH] == "length"
        assert STOP not in trailers


@pytest.mark.parametrize("stops", [["3"], ["nothing", "3", "9"], ["é\n", "3"]])
def test_it_has_the_stop_string_that_ended_the_answer(served: Backend, stops: list[str]) -> None:
    for trailers in _trailers(served, chat("Count to 5.", StopPrompts=stops)):
        assert trailers[FINISH] == "stop"
        assert trailers[STOP] == next(stop for stop in stops if "3" in stop).encode()


def test_it_has_the_number_of_cached_prompt_tokens(bare: Backend) -> None:
    bare.load()
    request = chat("What is the capital of France, and what is 3 plus 4?")
    reply, first = bare.stub.Predict.with_call(request, timeout=WAIT)
    _, second = bare.stub.Predict.with_call(request, timeout=WAIT)
    assert dict(first.trailing_metadata())[CACHED] == "0"
    assert dict(second.trailing_metadata())[CACHED] == str(reply.prompt_tokens - 1)


def test_it_has_the_number_of_reasoning_tokens(served: Backend) -> None:
    quick = chat("What is 7 plus 5?")
    thinking = chat("What is 7 plus 5?", Metadata={"enable_thinking": "true"})
    reported = {trailers[THOUGHT] for trailers in _trailers(served, thinking)}
    (count,) = map(int, reported)
    assert 0 < count < served.stub.Predict(thinking, timeout=WAIT).tokens
    assert [trailers[THOUGHT] for trailers in _trailers(served, quick)] == ["0", "0"]


def test_a_failed_call_has_none_of_it(served: Backend) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        served.stub.Predict(chat("Hi", Temperature=-1), timeout=WAIT)
    error: Any = refused.value
    assert FINISH not in dict(error.trailing_metadata())
