"""The token is checked first and for every method.

The model identity comes from successful loads.
"""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from backend.engine.errors import ModelNotFound
from backend.rpc.last_load import GUARDED
from tests.rpc.client import failure_of, raw_call
from tests.rpc.conftest import WAIT, Running
from tests.rpc.fake_engine import FakeEngine
from tests.rpc.requests_of_hosts import model_options, predict_options
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

Code = grpc.StatusCode
GOOD = (("authorization", "Bearer s3cret"),)
SERVICE = pb.DESCRIPTOR.services_by_name["Backend"]
METHODS = [method.name for method in SERVICE.methods]


def call(stub: BackendStub, method: str, request: Any, metadata: Any = ()) -> Any:
    return getattr(stub, method)(request, metadata=metadata)


def empty_request(method: str) -> Any:
    return getattr(pb, SERVICE.methods_by_name[method].input_type.name)()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ""),),
        (("authorization", "s3cret"),),
        (("authorization", "Bearer wrong"),),
        (("authorization", "bearer s3cret"),),
        (("authorization", "Bearer s3cret "),),
        (("x-authorization", "Bearer s3cret"),),
    ],
)
def test_no_method_answers_without_the_token(guarded: Running, method: str, metadata: Any) -> None:
    request = empty_request(method)
    refusal = failure_of(lambda: call(guarded.stub, method, request, metadata))
    assert refusal == (Code.UNAUTHENTICATED, "invalid token")
    assert guarded.engine.loads == []
    assert guarded.engine.requests == []


def test_the_token_admits_every_kind_of_call(guarded: Running) -> None:
    assert call(guarded.stub, "Health", pb.HealthMessage(), GOOD).message == b"OK"
    assert call(guarded.stub, "Predict", predict_options(), GOOD).message == b"Hello"
    assert len(list(call(guarded.stub, "PredictStream", predict_options(), GOOD))) == 3


def test_bytes_are_not_even_parsed_without_the_token(guarded: Running) -> None:
    path, raw = "/backend.Backend/Predict", b"\x0a\x02\xff\xfe"
    assert failure_of(lambda: raw_call(guarded.channel, path, raw)).code is Code.UNAUTHENTICATED


@pytest.mark.parametrize("path", ["/backend.Backend/TTS", "/other.Service/Method"])
def test_unknown_methods_need_the_token_too(guarded: Running, path: str) -> None:
    assert failure_of(lambda: raw_call(guarded.channel, path, b"")).code is Code.UNAUTHENTICATED
    known = failure_of(lambda: raw_call(guarded.channel, path, b"", GOOD))
    assert known.code is Code.UNIMPLEMENTED


def test_health_v1_and_reflection_need_the_token_too(guarded: Running) -> None:
    health: Any = health_pb2_grpc.HealthStub(guarded.channel)
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(guarded.channel)
    check = health_pb2.HealthCheckRequest()
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    for work in (
        lambda: health.Check(check),
        lambda: health.Watch(check),
        lambda: reflection.ServerReflectionInfo(iter([listing])),
    ):
        assert failure_of(work) == (Code.UNAUTHENTICATED, "invalid token")
    assert health.Check(check, metadata=GOOD).status == health_pb2.HealthCheckResponse.SERVING
    assert len(list(reflection.ServerReflectionInfo(iter([listing]), metadata=GOOD))) == 1


def test_a_refused_load_does_not_change_the_identity(guarded: Running) -> None:
    call(guarded.stub, "LoadModel", model_options(Model="a"), GOOD)
    failure_of(lambda: call(guarded.stub, "LoadModel", model_options(Model="b")))
    request = predict_options(ModelIdentity="b")
    code, _ = failure_of(lambda: call(guarded.stub, "Predict", request, GOOD))
    assert code is Code.NOT_FOUND


@pytest.mark.parametrize("method", sorted(GUARDED))
def test_a_call_for_another_model_is_refused(stub: BackendStub, method: str) -> None:
    stub.LoadModel(model_options(Model="org/a"))
    request = empty_request(method)
    request.ModelIdentity = "org/b"
    code, sentence = failure_of(lambda: call(stub, method, request))
    assert code is Code.NOT_FOUND
    assert sentence == "model identity mismatch: loaded 'org/a', requested 'org/b'"


def test_every_message_with_an_identity_is_checked() -> None:
    with_identity = {
        method.name
        for method in SERVICE.methods
        if "ModelIdentity" in method.input_type.fields_by_name
    }
    assert with_identity == GUARDED


def test_the_same_name_or_none_passes(stub: BackendStub) -> None:
    assert stub.Predict(predict_options(ModelIdentity="anything")).message == b"Hello"
    stub.LoadModel(model_options(Model="org/a"))
    for name in ("", "org/a"):
        assert stub.Predict(predict_options(ModelIdentity=name)).message == b"Hello"


def sent_away(stub: BackendStub, name: str) -> bool:
    state: Any = stub.Predict.future(predict_options(ModelIdentity=name)).exception(WAIT)
    return state is not None and "model identity mismatch" in state.details()


def test_the_identity_follows_successful_loads_and_survives_free(
    stub: BackendStub, engine: FakeEngine
) -> None:
    stub.LoadModel(model_options(Model="a"))
    engine.load_fault = ModelNotFound("model identity mismatch")
    code, sentence = failure_of(lambda: stub.LoadModel(model_options(Model="b")))
    assert code is Code.NOT_FOUND
    assert "model identity mismatch" not in sentence
    assert (sent_away(stub, "a"), sent_away(stub, "b")) == (False, True)
    stub.Free(pb.HealthMessage())
    assert (sent_away(stub, "a"), sent_away(stub, "b")) == (False, True)
    engine.load_fault = None
    stub.LoadModel(model_options(Model="b"))
    assert (sent_away(stub, "a"), sent_away(stub, "b")) == (True, False)


def test_a_load_whose_caller_has_left_still_sets_the_identity(
    stub: BackendStub, engine: FakeEngine
) -> None:
    stub.LoadModel(model_options(Model="a"))
    engine.hold_load = True
    load = stub.LoadModel.future(model_options(Model="b"))
    assert engine.holding.wait(WAIT)
    load.cancel()
    assert engine.left.wait(WAIT)
    assert (sent_away(stub, "a"), sent_away(stub, "b")) == (True, False)
