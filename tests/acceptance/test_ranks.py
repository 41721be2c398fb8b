"""Several ranks on this machine, each its own process, serve as one backend.

RANK_CYCLES=1000 loads a model, asks it something and frees it 1,000 times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.acceptance.backend import (
    TINY_TEXT,
    WAIT,
    Backend,
    chat,
    text_answer,
    text_of,
    threads_of,
)
from tests.engine.test_loading_adapters import ATTENTION, random_weights, write_adapter
from wire import backend_pb2 as pb

MODELS = TINY_TEXT.parent
LONG = 40
SHORT = chat("What is the capital of France?", Tokens=4)
pytestmark = pytest.mark.usefixtures("yielding")
CYCLES = int(os.environ.get("RANK_CYCLES", "20"))
SETTLED = 10  # cycles after which a process has allocated all that it keeps
# Bytes by which memory may grow. Ten cycles show leaks of 0.8 MiB a load, a thousand of 16 KiB.
GROWTH = (16 if CYCLES > 100 else 8) << 20
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
    assert lines[0].startswith("rank 0 (127.0.0.1): part 1 of 2 of every layer, ")
    assert lines[1].startswith("rank 1 (127.0.0.1): part 2 of 2 of every layer, ")
    with pytest.raises(grpc.RpcError, match="generates text and is divided among ranks") as caught:
        ranks.stub.Embedding(pb.PredictOptions(Embeddings="one process embeds it"), timeout=WAIT)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
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
        ({"Options": ["expert_cache_mib:8"]}, "expert_cache_mib is set"),
        ({"Options": ["distributed_backend:mpi"]}, "but the ranks of this process use ring"),
        ({"Embeddings": True}, "only models that generate text"),
        ({"DraftModel": str(MODELS / "tiny_draft")}, r"draft_model \(DraftModel\) is set"),
        ({"model": MODELS / "tiny_vision"}, "models that mlx-vlm builds"),
    ],
)
def test_requests_that_ranks_do_not_support_are_refused(
    ranks: Backend, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        ranks.load(**options)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_many_requests_at_once(ranks: Backend, answers: list[str]) -> None:
    ranks.load(Options=["load_trial:false"])
    for count in (2, 8, 32):
        asked = [place % len(QUESTIONS) for place in range(count)]
        calls = [ranks.stub.Predict.future(QUESTIONS[place], timeout=WAIT) for place in asked]
        texts = [call.result().message.decode() for call in calls]
        assert texts == [answers[place] for place in asked], count


@pytest.mark.timeout(60 + 10 * CYCLES)
def test_loads_leave_nothing_behind(ranks: Backend) -> None:
    """Memory, threads and descriptors of every rank; with -s, they are printed meanwhile."""
    processes = ranks.process().children()
    assert len(processes) == 2
    before: list[tuple[int, int, int]] = []
    began = time.monotonic()
    for cycle in range(CYCLES):
        if cycle == SETTLED:
            before = [_held(process) for process in processes]
        ranks.load(Options=["load_trial:false"])
        assert text_answer(ranks, SHORT)
        assert ranks.stub.Free(pb.HealthMessage(), timeout=WAIT).success
        if (cycle + 1) % 20 == 0:
            held = [_held(process) for process in processes]
            print(f"{cycle + 1} loads, {time.monotonic() - began:.0f} s: {held}", flush=True)
    after = [_held(process) for process in processes]
    for (memory, threads, files), (memory_now, threads_now, files_now) in zip(
        before, after, strict=True
    ):
        assert memory_now - memory < GROWTH
        assert (threads_now, files_now) == (threads, files)


def _held(process: psutil.Process) -> tuple[int, int, int]:
    return process.memory_info().rss, threads_of(process), process.num_fds()


def test_adapters_are_refused(ranks: Backend, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", random_weights(1, ATTENTION))
    with pytest.raises(grpc.RpcError, match=r"lora_adapter \(LoraAdapter\) is set") as caught:
        ranks.load(LoraAdapter=str(adapter))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_change_of_adapters_is_refused_and_the_model_stays(
    ranks: Backend, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", random_weights(1, ATTENTION))
    ranks.load(Options=["load_trial:false"])
    with pytest.raises(grpc.RpcError, match=r"option adapters is set.*ranks divide") as caught:
        ranks.load(Options=["load_trial:false", f"adapters:a={adapter}"])
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert text_answer(ranks, SHORT)


def test_no_process_outlives_sigterm(answers: list[str]) -> None:
    backend = Backend(arguments=["--ranks", "2"])
    backend.load(Options=["load_trial:false"])
    processes = others(backend)
    assert len([one for one in processes if "monitor" not in " ".join(one.cmdline())]) == 2
    assert backend.close() == 0
    _, alive = psutil.wait_procs(processes, WAIT)
    assert not alive
