"""Experts that stay in the checkpoint's files, in the real process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.acceptance.backend import WAIT, Backend
from tests.engine.experts.checkpoints import FORMS, write_experts
from tests.engine.loading_models import write_model
from wire import backend_pb2 as pb

_PROMPTS = ["The first of them", "And then another one came, and asked why.", "7 + 5 ="]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 25 MiB in float32, nearly all of it experts."""
    folder = tmp_path_factory.mktemp("experts") / "qwen"
    form = FORMS["Qwen3, one by one"]
    return write_experts(folder, form, moe_intermediate_size=1024)


@pytest.fixture
def backend(bare: Backend) -> Iterator[Backend]:
    """A process that holds no files of a model afterwards."""
    yield bare
    bare.stub.Free(pb.HealthMessage(), timeout=WAIT)
    assert _weight_files(bare) == []


def _weight_files(backend: Backend) -> list[str]:
    files = [file.path for file in backend.process().open_files()]
    return [path for path in files if path.endswith(".safetensors")]


def _answers(backend: Backend) -> list[bytes]:
    asked = [pb.PredictOptions(Prompt=text, Tokens=12, IgnoreEOS=True) for text in _PROMPTS]
    calls = [backend.stub.Predict.future(request, timeout=WAIT) for request in asked]
    return [call.result().message for call in calls]


def _reported(backend: Backend, method: str = "GetMetrics") -> dict[str, float]:
    asked = pb.MetricsRequest() if method == "GetMetrics" else pb.HealthMessage()
    _, call = getattr(backend.stub, method).with_call(asked, timeout=WAIT)
    found = dict(call.trailing_metadata())
    return {name: float(value) for name, value in found.items() if "expert" in name}


def _refused(backend: Backend, call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    error: Any = refused.value
    assert backend.child.poll() is None
    return error.code(), error.details()


def test_answers_are_those_of_the_resident_model(backend: Backend, folder: Path) -> None:
    backend.load(folder)
    expected = _answers(backend)
    assert _reported(backend) == {}
    assert _weight_files(backend) == []
    for options in ("expert_cache_mib:8", "expert_cache_mib:64", "memory_limit_mib:16"):
        backend.load(folder, Options=[options], ContextSize=256)
        assert _answers(backend) == expected
        counts = _reported(backend)
        assert counts == _reported(backend, "Status")
        # No byte is wasted where every wrong read is cancelled before a thread begins it.
        assert 0 <= counts.pop("mlx-expert-wasted-bytes") < counts["mlx-expert-read-bytes"]
        assert len(counts) == 6
        assert min(counts.values()) > 0
        assert len(_weight_files(backend)) == 3


def test_status_reports_the_cache_within_its_bound(backend: Backend, folder: Path) -> None:
    backend.load(folder, Options=["expert_cache_mib:12"], ContextSize=256)
    _answers(backend)
    memory = backend.stub.Status(pb.HealthMessage(), timeout=WAIT).memory
    parts = dict(memory.breakdown)
    assert 4 << 20 < parts["expert_cache"] <= 12 << 20
    assert parts["weights"] < 4 << 20
    assert sum(parts.values()) - parts["mlx_active"] - parts["mlx_cache"] <= memory.total


def test_a_changed_file_ends_requests_and_nothing_else(
    backend: Backend, folder: Path, tmp_path: Path
) -> None:
    own = write_experts(tmp_path / "own", FORMS["Qwen3, one by one"], moe_intermediate_size=1024)
    backend.load(own, Options=["expert_cache_mib:8"], ContextSize=256)
    for file in own.glob("*.safetensors"):
        os.truncate(file, 4096)
    code, message = _refused(backend, lambda: _answers(backend))
    assert code is grpc.StatusCode.INTERNAL
    assert "has changed since the model was loaded" in message
    assert str(tmp_path) not in message
    backend.load(folder, Options=["expert_cache_mib:8"], ContextSize=256)
    assert all(_answers(backend))


def test_what_cannot_be_offloaded_is_refused_where_it_was_asked_for(
    backend: Backend, folder: Path, tmp_path: Path
) -> None:
    dense = write_model(tmp_path / "dense")

    def load(model: Path, *options: str, **fields: Any) -> pb.Result:
        return backend.load(model, Options=list(options), ContextSize=256, **fields)

    code, message = _refused(backend, lambda: load(dense, "expert_cache_mib:8"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message == (
        "option expert_cache_mib is 8, but the model has no experts that could stay in its files:"
        " leave expert_cache_mib out, or change it"
    )
    code, message = _refused(backend, lambda: load(folder, "expert_cache_mib:1"))
    assert "a cache of 1 MiB cannot hold one expert of each layer, which takes 7 MiB" in message
    code, message = _refused(
        backend, lambda: load(folder, "expert_cache_mib:0", "memory_limit_mib:16")
    )
    assert "its weights take 24 MiB and MLX may use 16 MiB" in message
    code, message = _refused(backend, lambda: load(dense, "expert_cache_mib:8", "type:embedding"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith("option expert_cache_mib is 8, but the model")
    assert message.endswith(": leave it out for this model")
    assert load(dense, "expert_cache_mib:0").success
