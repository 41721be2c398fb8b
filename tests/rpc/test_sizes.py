"""Requests are limited by size before they are parsed, and valid ones are never refused."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.errors import InvalidRequest
from backend.rpc import request_limits
from backend.rpc.request_limits import require_bounded
from tests.rpc.client import failure_of, raw_call
from tests.rpc.conftest import Running
from wire import backend_pb2 as pb

MIB = 1 << 20
EMPTY_MESSAGE = b"\xe2\x02\x00"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"LogitBias": " " * (2 * MIB)}, f"LogitBias is {2 * MIB} bytes long: send at most {MIB}"),
        ({"ToolChoice": '"' * MIB}, f"ToolChoice is {MIB} bytes long"),
        ({"Grammar": "é" * MIB}, f"Grammar is {2 * MIB} bytes long"),
        ({"Metadata": {"a": "b" * (9 * MIB)}}, "Metadata is "),
        ({"Metadata": {str(n): "" for n in range(30_000)}}, "more than 20000 fields"),
        ({"StopPrompts": [""] * 40_000}, "more than 20000 fields"),
        ({"NegativePrompt": "a" * MIB}, "NegativePrompt is "),
        ({"ModelIdentity": "a" * MIB}, "ModelIdentity is "),
        ({"EmbeddingTokens": [1] * (9 * MIB)}, "EmbeddingTokens is "),
    ],
)
def test_a_field_that_is_too_large_is_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        require_bounded(pb.PredictOptions, pb.PredictOptions(**fields).SerializeToString())
    assert sentence in str(refused.value)


@pytest.mark.parametrize("message", [pb.PredictOptions, pb.HealthMessage, pb.RerankRequest])
@pytest.mark.parametrize("raw", [EMPTY_MESSAGE, b"\xf8\x7f\x01", b"\x12\x00", b"\x85\x01abcd"])
def test_many_small_entries_are_not_parsed(message: type[Any], raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="more than 20000 fields"):
        require_bounded(message, raw * 100_000)


def test_a_refusal_is_the_answer_of_the_call(running: Running) -> None:
    raw = pb.PredictOptions(Prompt="Hello").SerializeToString() + EMPTY_MESSAGE * 3_000_000
    failure = failure_of(lambda: raw_call(running.channel, "/backend.Backend/Predict", raw))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "more than 20000 fields" in failure.sentence


def test_requests_of_real_hosts_pass() -> None:
    options = pb.PredictOptions(
        Messages=[pb.Message(role="user", content="a" * 1000)] * 10_000,
        Tools=json.dumps([{"type": "function", "function": {"name": "f" * 100}}] * 10_000),
        Images=["A" * (10 * MIB)],
        Prompt="a" * (10 * MIB),
        StopPrompts=["é" * 2000] * 64,
        LogitBias=json.dumps({str(token): -100.0 for token in range(10_000)}),
        Grammar="a" * 262_144,
        EmbeddingTokens=range(MIB),
    )
    require_bounded(pb.PredictOptions, options.SerializeToString())
    score = pb.ScoreRequest(prompt="a" * 10 * MIB, candidates=["b" * 1000] * 1024)
    require_bounded(pb.ScoreRequest, score.SerializeToString())


@given(raw=st.binary(max_size=300), repeated=st.integers(1, 50))
def test_any_bytes_are_read_to_their_end_or_refused(raw: bytes, repeated: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_limits, "_FREE", 0)
        with suppress(InvalidRequest):
            require_bounded(pb.PredictOptions, raw * repeated)
