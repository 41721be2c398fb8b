"""A conversation goes on after a restart: the scheduler, with a disk under it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.engine.commands import Submit
from backend.engine.disk_cache.use import DiskUse
from backend.engine.prefix_index import PrefixKey
from backend.engine.request import GenerationRequest, RawPrompt
from tests.engine.disk_cache.rows import KINDS, PATIENCE, disk_cache, entries_in, model_of, words
from tests.engine.rounds import Heard, Rounds, alone, engine_model

ALL = DiskUse(answer=True)


@pytest.fixture(autouse=True)
def _no_compiler() -> None:
    mx.disable_compile()


class Process:
    """A model with a disk cache, as a process that was just started has it."""

    def __init__(self, kind: str, folder: Path | None, **changes: Any) -> None:
        self.disk = disk_cache(model_of(kind), folder)
        self.rounds = Rounds(engine_model(model_of(kind), disk=self.disk, **changes))
        self.without_disk = engine_model(model_of(kind))
        self.tickets = 0

    def ask(self, prompt: Sequence[int], use: DiskUse = ALL, limit: int = 6) -> Heard:
        """Ask as the engine does: the disk first, then a place among the rows."""
        self.tickets += 1
        held = self.rounds.scheduler.planner.index.find(PrefixKey(prompt)).length
        stored = self.disk.find(prompt, path=use.path, held=held)
        self.rounds.heard[self.tickets] = Heard()
        wanted = GenerationRequest(str(self.tickets), RawPrompt(""), disk=use)
        self.rounds.scheduler.submit(
            Submit(1, self.tickets, wanted, list(prompt), limit, stored=stored)
        )
        self.rounds.drain()
        assert self.disk.drain(PATIENCE)
        heard = self.rounds.heard[self.tickets]
        assert heard.finished is not None
        assert heard.tokens == alone(self.without_disk, prompt, limit).tokens
        return heard


def cached(heard: Heard) -> int:
    assert heard.finished is not None
    return heard.finished.usage.cached_tokens


@pytest.mark.parametrize("memory", [0, 1 << 26])
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on_after_a_restart(kind: str, memory: int, tmp_path: Path) -> None:
    prompt = words(120)
    heard = Process(kind, tmp_path, prompt_cache_bytes=memory).ask(prompt)
    more = [*prompt, *heard.tokens, 7, 8, 9]
    restarted = Process(kind, tmp_path, prompt_cache_bytes=memory)
    first = cached(restarted.ask(more))
    # What cannot be cut back and was fed its end of sequence goes on from the prompt.
    whole = len(prompt) + len(heard.tokens)
    assert first >= (whole - 1 if kind in ("full", "quantised", "bfloat16") else len(prompt) - 1)
    again = cached(Process(kind, tmp_path, prompt_cache_bytes=memory).ask(prompt))
    assert again == len(prompt) - 1, "the same prompt runs its last token only"


def test_the_prompt_alone_is_kept_where_that_is_asked(tmp_path: Path) -> None:
    prompt = words(100)
    own = tmp_path / "own"
    heard = Process("full", None).ask(prompt, DiskUse(own))
    other = Process("full", None)
    assert cached(other.ask([*prompt, *heard.tokens, 5], DiskUse(own, read_only=True))) == 99
    assert not entries_in(tmp_path)


def test_a_request_that_only_reads_writes_nothing(tmp_path: Path) -> None:
    Process("full", tmp_path).ask(words(100), DiskUse(answer=True, read_only=True))
    assert not entries_in(tmp_path)


def test_memory_is_asked_before_the_disk(tmp_path: Path) -> None:
    process = Process("full", tmp_path)
    prompt = words(100)
    process.ask(prompt)
    for path in entries_in(tmp_path):
        path.unlink()
    assert cached(process.ask(prompt)) == 99
