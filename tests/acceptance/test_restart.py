"""A conversation's KV outlives the process, and is used for no other model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.backend import WAIT, Backend, chat
from tests.polling import until
from wire import backend_pb2 as pb

LONG = "The quick brown fox jumps over the lazy dog. " * 12
FIRST = f"{LONG}\n\nMy name is Nora."


@contextmanager
def _process(*options: str, **fields: Any) -> Iterator[Backend]:
    backend = Backend()
    try:
        backend.load(Options=list(options), **fields)
        yield backend
    finally:
        assert backend.close() == 0


def _saved(backend: Backend, folder: Path) -> None:
    """Wait until an entry is on disk: a save still running a second after SIGTERM is dropped."""
    until(lambda: backend.idle() and any(folder.rglob("*.safetensors")))


def _processed(backend: Backend, request: pb.PredictOptions) -> tuple[str, int, int]:
    """The answer, the number of prompt tokens, and how many of them were computed."""
    before = backend.stub.GetMetrics(pb.MetricsRequest(), timeout=WAIT).prompt_tokens_processed
    reply = backend.stub.Predict(request, timeout=WAIT)
    after = backend.stub.GetMetrics(pb.MetricsRequest(), timeout=WAIT).prompt_tokens_processed
    return reply.message.decode(), reply.prompt_tokens, after - before


@pytest.mark.parametrize("own_file", [False, True])
def test_the_next_turn_after_a_restart_computes_only_the_new_tokens(
    tmp_path: Path, own_file: bool
) -> None:
    options = [] if own_file else [f"prompt_cache_dir:{tmp_path}"]
    disk = {"PromptCachePath": str(tmp_path / "talk"), "PromptCacheAll": True} if own_file else {}
    with _process(*options) as backend:
        text, prompt_tokens, processed = _processed(backend, chat(FIRST, **disk))
        assert processed == prompt_tokens
        _saved(backend, tmp_path)
        following = chat(FIRST, text, "What is my name?", **disk)
        expected = backend.stub.Predict(following, timeout=WAIT).message.decode()
    with _process(*options) as backend:
        answer, prompt_tokens, processed = _processed(backend, following)
        assert answer == expected
        assert processed < prompt_tokens // 4


def test_another_dtype_of_the_model_does_not_read_it(tmp_path: Path) -> None:
    folder = f"prompt_cache_dir:{tmp_path}"
    with _process(folder) as backend:
        _processed(backend, chat(FIRST))
        _saved(backend, tmp_path)
    with _process(folder, "kv_bits:8") as backend:
        _, prompt_tokens, processed = _processed(backend, chat(FIRST))
        assert processed == prompt_tokens
        backend.load(Options=[folder], DType="bfloat16")
        _, prompt_tokens, processed = _processed(backend, chat(FIRST))
        assert processed == prompt_tokens


def test_damaged_and_foreign_files_are_cache_misses(tmp_path: Path) -> None:
    folder = f"prompt_cache_dir:{tmp_path}"
    with _process(folder) as backend:
        answer, _, _ = _processed(backend, chat(FIRST))
        _saved(backend, tmp_path)
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stored
    for path in stored:
        content = bytearray(path.read_bytes())
        content[len(content) * 3 // 4] ^= 0x10
        path.write_bytes(content)
    (tmp_path / "notes.txt").write_text("not ours")
    with _process(folder) as backend:
        again, prompt_tokens, processed = _processed(backend, chat(FIRST))
        assert (again, processed) == (answer, prompt_tokens)
    assert (tmp_path / "notes.txt").read_text() == "not ours"


def test_a_foreign_file_is_not_removed_and_a_read_only_cache_writes_nothing(
    tmp_path: Path,
) -> None:
    mine, cache = tmp_path / "letter", tmp_path / "cache"
    mine.write_text("dear reader")
    with _process(f"prompt_cache_dir:{cache}") as backend:
        _processed(backend, chat(FIRST, PromptCacheRO=True, PromptCacheAll=True))
        _processed(backend, chat(LONG, PromptCachePath=str(mine), PromptCacheAll=True))
    assert mine.read_text() == "dear reader"
    assert [path for path in cache.rglob("*") if path.is_file()] == []
