"""Error messages name the key of a model's YAML file beside the field of the protocol."""

from __future__ import annotations

import grpc
import pytest

from backend.engine import errors
from backend.rpc.fields import YAML_KEYS
from backend.rpc.statuses import status_of
from common.field_names import named
from gateway.supervisor.instance import _KEYS
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub


def test_the_keys_of_a_model_file_are_those_that_the_gateway_passes_on() -> None:
    passed = {name: key for name, key in _KEYS.items() if name != "Type"}  # Type has no effect
    assert len(passed) > 20
    assert {name: YAML_KEYS[name] for name in passed} == passed


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            errors.InvalidRequest(f"{named('ContextSize')} is -1: send 0"),
            "context_size (ContextSize) is -1: send 0",
        ),
        (errors.InvalidRequest(f"{named('Tokens')} is -5"), "max_tokens (Tokens) is -5"),
        (errors.InvalidRequest("Tokens of the prompt"), "Tokens of the prompt"),
        (
            errors.InvalidRequest(
                f"{named('LoraScales')} has 2, {named('LoraAdapters')} 1, {named('LoraScales')}"
            ),
            "lora_scales (LoraScales) has 2, lora_adapters (LoraAdapters) 1, LoraScales",
        ),
        (
            errors.InvalidRequest("the key 'TopK' of x.DType is MyTopK"),
            "the key 'TopK' of x.DType is MyTopK",
        ),
        (errors.ModelRejected(f"{named('DraftModel')} is set"), "draft_model (DraftModel) is set"),
    ],
)
def test_a_message_names_both_once(error: Exception, sentence: str) -> None:
    assert status_of(error).message == sentence


def test_a_refused_load_names_both(stub: BackendStub) -> None:
    for options, start in (
        (pb.ModelOptions(Model="x", ContextSize=-1), "context_size (ContextSize) is -1: "),
        (pb.ModelOptions(Model="x", RopeFreqBase=2), "rope_freq_base (RopeFreqBase) is 2, but "),
        (pb.ModelOptions(Model="x", Quantization="q4"), "quantization (Quantization) is set, but "),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            stub.LoadModel(options)
        assert (refused.value.details() or "").startswith(start)
