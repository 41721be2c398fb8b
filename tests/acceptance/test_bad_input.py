"""Each bad input gets its own status and message, and the next request is served."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.acceptance.backend import WAIT, Backend, chat
from tests.polling import until
from wire import backend_pb2 as pb

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
def healthy(served: Backend) -> Iterator[Backend]:
    yield served
    assert served.stub.Predict(chat("Count to 5."), timeout=WAIT).message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"Prompt": ""}, "prompt is empty"),
        ({"Prompt": "x", "Temperature": math.nan}, "temperature (Temperature) is nan"),
        ({"Prompt": "x", "Temperature": -1.0}, "temperature (Temperature) is -1"),
        ({"Prompt": "x", "Temperature": math.inf}, "temperature (Temperature) is inf"),
        ({"Prompt": "x", "TopP": -0.5}, "top_p (TopP) is -0.5"),
        ({"Prompt": "x", "TopP": math.nan}, "top_p (TopP) is nan"),
        ({"Prompt": "x", "MinP": 2.0}, "min_p (MinP) is 2"),
        ({"Prompt": "x", "MinP": -1.0}, "min_p (MinP) is -1"),
        ({"Prompt": "x", "TopK": -7}, "top_k (TopK) is -7"),
        ({"Prompt": "x", "Tokens": -2_000_000}, "max_tokens (Tokens) is -2000000"),
        ({"Prompt": "x", "Penalty": -1.3}, "Penalty"),
        ({"Prompt": "x", "FrequencyPenalty": math.nan}, "FrequencyPenalty"),
        ({"Prompt": "x", "PresencePenalty": math.inf}, "PresencePenalty"),
        ({"Prompt": "x", "Grammar": "root ::= nowhere"}, "nowhere"),
        ({"Prompt": "x", "LogitBias": '{"x": -100}'}, "LogitBias"),
        ({"Prompt": "x", "Logprobs": -1}, "Logprobs"),
        ({"Prompt": "x", "TopLogprobs": 10_000}, "TopLogprobs"),
        ({"Prompt": "x", "Images": ["aGk="]}, "Images"),
        ({"Prompt": "word " * 20_000}, "tokens > 4095 maximum"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(sorted(value.items()))[:60],
)
def test_the_error_names_the_bad_field(
    healthy: Backend, fields: dict[str, Any], words: str
) -> None:
    request = pb.PredictOptions(**fields)
    for call in (
        lambda: healthy.stub.Predict(request, timeout=WAIT),
        lambda: list(healthy.stub.PredictStream(request, timeout=WAIT)),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is INVALID
        assert words in (refused.value.details() or "")


def test_extreme_sampling_values_get_an_answer_and_do_not_affect_other_requests(
    healthy: Backend,
) -> None:
    """In another server, `top_k` beyond the vocabulary broke the process for good."""
    for fields in (
        {"TopK": 2**31 - 1},
        {"TopP": 1e-30},
        {"MinP": 1.0},
        {"Temperature": 1e-30},
        {"Seed": -(2**31)},
        {"TopP": 5.0},
    ):
        request = chat("Count to 5.", Tokens=5, **({"Temperature": 1.0} | fields))
        assert healthy.stub.Predict(request, timeout=WAIT).tokens


def test_a_message_above_50_mib_is_refused(healthy: Backend) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        healthy.stub.Predict(pb.PredictOptions(Prompt="x" * (50 * 2**20 + 1)), timeout=WAIT)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_prompt_of_almost_50_mib_is_refused_at_once(healthy: Backend) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        healthy.stub.Predict(pb.PredictOptions(Prompt="x " * (24 * 2**20)), timeout=WAIT)
    assert refused.value.code() is INVALID
    assert "tokens > 4095 maximum" in (refused.value.details() or "")


def test_bytes_that_are_not_utf8_are_refused(healthy: Backend) -> None:
    call: Any = healthy.channel.unary_unary("/backend.Backend/Predict")
    with pytest.raises(grpc.RpcError) as refused:
        call(b"\x0a\x02\xff\xfe", timeout=WAIT)
    assert refused.value.code() is INVALID


def test_requests_without_a_loaded_model_are_refused(bare: Backend) -> None:
    calls = {
        bare.stub.Predict: chat("Hi"),
        bare.stub.PredictStream: chat("Hi"),
        bare.stub.TokenizeString: pb.PredictOptions(Prompt="x"),
        bare.stub.Detokenize: pb.DetokenizeRequest(tokens=[1]),
        bare.stub.ModelMetadata: pb.ModelOptions(),
    }
    for method, request in calls.items():
        with pytest.raises(grpc.RpcError) as refused:
            list(method(request, timeout=WAIT))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "model not loaded" in (refused.value.details() or "")
    assert bare.load().success


def test_each_model_that_cannot_be_loaded_gets_its_own_error(bare: Backend, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for reference, code, words in (
        (tmp_path / "nowhere", grpc.StatusCode.NOT_FOUND, "nowhere"),
        (tmp_path / "empty", INVALID, "the folder is empty"),
        (tmp_path / "model.gguf", INVALID, "GGUF"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            bare.load(reference)
        assert refused.value.code() is code
        details = refused.value.details() or ""
        assert words in details
        assert str(tmp_path) not in details


def test_a_setting_with_a_bad_value_fails_the_load(bare: Backend) -> None:
    """In another server, a value of the wrong type loaded and then failed every request."""
    for options, code, words in (
        ({"Options": ["max_cache_entries:abc"]}, INVALID, "max_cache_entries"),
        ({"EngineArgs": '{"paralel": 4}'}, INVALID, "parallel"),
        ({"EngineArgs": "[]"}, INVALID, "EngineArgs"),
        ({"ContextSize": -4}, INVALID, "ContextSize"),
        ({"LoraAdapter": "x"}, grpc.StatusCode.NOT_FOUND, "adapter 'x'"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            bare.load(**options)
        assert refused.value.code() is code
        assert words in (refused.value.details() or "")
    assert bare.load(Options=["tool_parser:hermes", "unknown_key:1"]).success
    until(lambda: bare.idle() and any("unknown_key" in line for line in bare.log))
