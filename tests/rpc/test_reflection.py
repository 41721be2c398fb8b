"""The service can be listed, described and called without a proto file, and probed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.rpc.client import failure_of
from tests.rpc.conftest import WAIT, Running
from wire import backend_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_python_lists_describes_and_calls_by_reflection(running: Running) -> None:
    database = ProtoReflectionDescriptorDatabase(running.channel)
    assert set(database.get_services()) == {
        "backend.Backend",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    service = DescriptorPool(database).FindServiceByName("backend.Backend")
    described, ours = (
        descriptor_pb2.ServiceDescriptorProto(),
        descriptor_pb2.ServiceDescriptorProto(),
    )
    service.CopyToProto(described)
    pb.DESCRIPTOR.services_by_name["Backend"].CopyToProto(ours)
    assert described == ours
    predict = service.methods_by_name["Predict"]
    request, reply = GetMessageClass(predict.input_type), GetMessageClass(predict.output_type)
    call = running.channel.unary_unary(
        "/backend.Backend/Predict", request.SerializeToString, reply.FromString
    )
    answer: Any = call(request(Prompt="hi"), timeout=WAIT)
    assert answer.message == b"Hello"


def test_health_v1_is_serving_until_the_process_exits(running: Running) -> None:
    health: Any = health_pb2_grpc.HealthStub(running.channel)
    request = health_pb2.HealthCheckRequest(service="backend.Backend")
    watch = health.Watch(request)
    assert next(watch).status == SERVING
    for name in ("", "backend.Backend"):
        assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == SERVING
    failure = failure_of(lambda: health.Check(health_pb2.HealthCheckRequest(service="nobody")))
    assert failure.code is grpc.StatusCode.NOT_FOUND
    running.refuse_new()
    assert next(watch).status == NOT_SERVING
    watch.cancel()
    assert health.Check(request).status == NOT_SERVING
    failure = failure_of(lambda: running.stub.Health(pb.HealthMessage()))
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.sentence == "the backend is shutting down"


GRPCURL = os.environ.get("GRPCURL") or shutil.which("grpcurl")


@pytest.mark.skipif(GRPCURL is None, reason="no grpcurl on PATH or in GRPCURL")
def test_grpcurl_lists_describes_and_calls(running: Running) -> None:
    def grpcurl(*arguments: str, data: str = "") -> str:
        assert GRPCURL is not None
        options = ["-d", data] if data else []
        address = f"127.0.0.1:{running.port}"
        command = [GRPCURL, "-plaintext", *options, address, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=WAIT, check=True
        ).stdout

    assert "backend.Backend" in grpcurl("list").split()
    assert "backend.Backend.PredictStream" in grpcurl("list", "backend.Backend").split()
    assert "stream .backend.Reply" in grpcurl("describe", "backend.Backend.PredictStream")
    assert json.loads(grpcurl("backend.Backend/Health"))["message"] == "T0s="
    reply = json.loads(grpcurl("backend.Backend/Predict", data='{"Prompt": "hi"}'))
    assert reply["message"] == "SGVsbG8="
    assert [{"content": "Hello"}] in reply.values()  # grpcurl versions differ in the key
