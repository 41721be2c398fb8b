"""Several ranks on this machine, each its own process, serve as one backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.acceptance.backend import WAIT, Backend, chat, text_of
from wire import backend_pb2 as pb

LONG = 40
QUESTIONS = [
    chat("What is the capital of France?", Tokens=LONG),
    chat("Say something.", Tokens=LONG, Temperature=0.9, TopP=0.95, Seed=11, IgnoreEOS=True),
    chat("Count.", Tokens=LONG, Temperature=0.7, Seed=3, Grammar='root ::= ("1" | "2" | ", ")+'),
    chat("Say a word.", Tokens=LONG, StopPrompts=["a"], Penalty=1.2),
]


@pytest.fixture(scope="module")
def answers() -> Iterator[list[str]]:
    """The answers of a single process."""
    backend = Backend()
    backend.load(Options=["load_trial:false"])
    yield [text_of(backend.stub.PredictStream(each, timeout=WAIT)) for each in QUESTIONS]
    backend.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Backend]:
    backend = Backend(arguments=["--ranks", "2"])
    yield backend
    backend.close()


def others(backend: Backend) -> list[psutil.Process]:
    return backend.process().children(recursive=True)


def test_two_ranks_answer_as_one_process_does(ranks: Backend, answers: list[str]) -> None:
    assert ranks.stub.Health(pb.HealthMessage(), timeout=WAIT).message == b"OK"
    result = ranks.load()
    assert "2 ranks, tensor: rank 0 (127.0.0.1) has part 1 of 2 of every layer" in result.message
    assert [text_of(ranks.stub.PredictStream(each, timeout=WAIT)) for each in QUESTIONS] == answers
    together = [ranks.stub.Predict.future(each, timeout=WAIT) for each in QUESTIONS]
    assert [call.result().message.decode() for call in together] == answers
    _, call = ranks.stub.Status.with_call(pb.HealthMessage(), timeout=WAIT)
    lines = [value for key, value in call.trailing_metadata() if key == "mlx-rank"]
    assert len(lines) == 2
    assert "of control per step" in lines[0]
    assert lines[1].startswith("rank 1 (127.0.0.1): part 2 of 2 of every layer, ")
    assert ranks.stub.Free(pb.HealthMessage(), timeout=WAIT).success


def test_a_load_that_fails_does_not_affect_the_next(ranks: Backend, tmp_path: Path) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ranks.load(tmp_path / "none")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert ranks.load().success


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"Options": ["prompt_lookup:true"]}, "prompt_lookup is set"),
        ({"Options": ["prompt_cache_dir:/tmp"]}, "prompt_cache_dir is set"),
        ({"Embeddings": True}, "only models that generate text"),
    ],
)
def test_requests_that_ranks_do_not_support_are_refused(
    ranks: Backend, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        ranks.load(**options)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_no_process_outlives_sigterm(answers: list[str]) -> None:
    backend = Backend(arguments=["--ranks", "2"])
    backend.load(Options=["load_trial:false"])
    processes = others(backend)
    assert len([one for one in processes if "monitor" not in " ".join(one.cmdline())]) == 2
    assert backend.close() == 0
    _, alive = psutil.wait_procs(processes, WAIT)
    assert not alive
