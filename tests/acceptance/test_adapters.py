"""Adapters that a host adds to and removes from a loaded model by LoadModel."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.acceptance.backend import TINY_TEXT, WAIT, Backend, chat, refusal, text_answer, text_of
from tests.gateway.openai.test_adapters import write_random
from tests.polling import until
from wire import backend_pb2 as pb

QUESTION = "What is the capital of France?"
NAMES = ("", "a", "b")


def ask(name: str, tokens: int = 24, **fields: object) -> pb.PredictOptions:
    metadata = {"enable_thinking": "false", "mlx.adapter": name}
    return chat(QUESTION, Metadata=metadata, Tokens=tokens, **fields)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_random(folder / name, seed) for seed, name in enumerate(("a", "b"))}


def load(backend: Backend, **adapters: str) -> pb.Result:
    named = ", ".join(map("=".join, adapters.items()))
    return backend.load(Options=["load_trial:false", f"adapters:{named}"])


def test_adapters_change_while_streams_run(bare: Backend, folders: dict[str, str]) -> None:
    load(bare, **folders)
    long = {name: text_answer(bare, ask(name, 400, IgnoreEOS=True)) for name in NAMES}
    alone = {name: text_answer(bare, ask(name)) for name in NAMES}
    assert len(set(alone.values())) == 3
    load(bare)

    def loads() -> int:
        return sum("weights" in line and "loaded in" in line for line in bare.log)

    until(lambda: loads() == 1)
    streams = {}
    for name in NAMES:
        if name:
            load(bare, **{name: folders[name]})
        request = ask(name, 400, IgnoreEOS=True)
        streams[name] = bare.stub.PredictStream(request, timeout=WAIT)
        next(streams[name])
        assert text_answer(bare, ask(name)) == alone[name]
    result = load(bare)
    assert "adapter" in result.message
    assert "no such adapter" in refusal(bare, ask("b"))
    begun = {name: text_of(stream) for name, stream in streams.items()}
    assert all(long[name].endswith(begun[name]) and begun[name] for name in NAMES)
    assert loads() == 1
    status = bare.stub.Status(pb.HealthMessage(), timeout=WAIT)
    assert status.memory.breakdown["adapters"] == 0


def test_a_refused_change_leaves_the_adapters_as_they_are(
    bare: Backend, folders: dict[str, str], tmp_path: Path
) -> None:
    load(bare, a=folders["a"])
    before = text_answer(bare, ask("a"))
    for reference, words in ((str(tmp_path), "adapter_config.json"), (str(TINY_TEXT), "complete")):
        with pytest.raises(grpc.RpcError) as caught:
            load(bare, a=folders["a"], b=reference)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert words in str(caught.value.details())
    assert text_answer(bare, ask("a")) == before
    assert "use one of a" in refusal(bare, ask("b"))
