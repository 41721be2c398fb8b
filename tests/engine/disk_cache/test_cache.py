"""KV restored from disk gives the same results as KV that never left memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.engine.caching import kv
from backend.engine.caching.layer_kv import STEP
from backend.engine.commands import Submit
from backend.engine.disk_cache import cache as cache_module
from backend.engine.disk_cache import prefix_folder as folder_module
from backend.engine.disk_cache.cache import LEAST_TOKENS, DiskCache
from backend.engine.disk_cache.prefix_folder import (
    Folder,
    Prefix,
    PrefixFile,
    StoredPrefix,
    read_prefix,
    write_file,
)
from backend.engine.disk_cache.use import DiskUse
from backend.engine.engine import Engine
from backend.engine.errors import Overloaded
from backend.engine.load_request import LoadRequest
from backend.engine.planning.prefix_index import PrefixKey
from backend.engine.request import GenerationRequest, RawPrompt
from backend.engine.units import MIB
from tests.engine.disk_cache.rows import (
    KINDS,
    PATIENCE,
    disk_cache,
    entries_in,
    feed,
    filled,
    greedy,
    model_of,
    same,
    saved,
    words,
)
from tests.engine.rounds import Received, Rounds, alone, engine_model
from tests.polling import until


def restored(disk: DiskCache, model: Any, prompt: list[int]) -> tuple[kv.RowCache, int]:
    """The row that the disk returns for a prompt, and how many tokens are in it."""
    stored = disk.find(prompt)
    assert stored is not None
    row = disk.restore(stored, kv.new_row(model))
    assert row is not None
    return row, stored.length


TRIMMABLE = ("full", "quantised", "bfloat16", "8 and 4 bits")


def first(model: Any, tokens: list[int], length: int) -> kv.RowCache:
    """The first `length` tokens of the row that was saved.

    A pass of these tokens alone may round differently.
    """
    row = filled(model, tokens)
    assert kv.trim(row, len(tokens) - length)
    return row


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_survives_a_restart_bit_for_bit(kind: str, copy: bool, tmp_path: Path) -> None:
    model, tokens = model_of(kind), words(100)
    before = disk_cache(model, tmp_path, copy=copy)
    saved(before, model, tokens)
    before.close(PATIENCE)
    row, length = restored(disk_cache(model, tmp_path), model, [*tokens, 5])
    assert length == len(tokens)
    kept = filled(model, tokens)
    assert same(row, kept)
    assert mx.array_equal(feed(model, row, [5, 6]), feed(model, kept, [5, 6]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_equals_that_of_a_computed_prompt(kind: str, tmp_path: Path) -> None:
    model, prompt = model_of(kind), words(130)
    disk = disk_cache(model, tmp_path)
    saved(disk, model, prompt[:96])
    row, length = restored(disk, model, prompt)
    assert length == 96
    expected = greedy(model, kv.new_row(model), prompt, 12)
    assert greedy(model, row, prompt[96:], 12) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_left_a_batch_is_stored_like_any_other(kind: str, tmp_path: Path) -> None:
    model, tokens = model_of(kind), words(80)
    batch = kv.BatchCache([filled(model, tokens), filled(model, words(33, 3))])
    model(mx.array([[5], [6]]), cache=batch.layers)
    row = batch.extract(0)
    kv.evaluate(row)
    disk = disk_cache(model, tmp_path)
    disk.save([*tokens, 5], row, trimmable=kv.can_trim(row))
    assert disk.drain(PATIENCE)
    back, length = restored(disk, model, [*tokens, 5, 7])
    assert length == len(tokens) + 1
    assert same(back, row)


@pytest.mark.parametrize("kind", TRIMMABLE)
def test_trimmable_kv_serves_any_common_prefix(kind: str, tmp_path: Path) -> None:
    model, tokens = model_of(kind), words(150)
    disk = disk_cache(model, tmp_path)
    saved(disk, model, tokens)
    for prompt in ([*tokens[:90], 3, 1, 4], tokens[:91], tokens):
        row, length = restored(disk, model, prompt)
        assert length == (90 if len(prompt) < 100 else 149)
        assert same(row, first(model, tokens, length))


@pytest.mark.parametrize("kind", TRIMMABLE)
def test_a_row_from_a_longer_file_holds_no_more_than_its_own_tokens(
    kind: str, tmp_path: Path
) -> None:
    """There may be space for fewer tokens than those by which a cache grows."""
    model, tokens = model_of(kind), words(1600)
    disk = disk_cache(model, tmp_path)
    saved(disk, model, tokens)
    for length in (500, 1270, 1500, 1599):
        gc.collect()
        mx.synchronize()
        mx.clear_cache()  # MLX would put an array into a released buffer of up to twice its size
        before = mx.get_active_memory()
        row, reused = restored(disk, model, [*tokens[:length], 5])
        mx.synchronize()
        held = mx.get_active_memory() - before
        assert reused == length
        assert held <= kv.cost(model).of(length + STEP - 1), kv.nbytes(row)
        assert same(row, first(model, tokens, length))
        del row


@pytest.mark.parametrize("kind", ["window", "hybrid", "recurrent"])
def test_kv_that_cannot_be_trimmed_serves_only_its_continuations(kind: str, tmp_path: Path) -> None:
    model, tokens = model_of(kind), words(100)
    disk = disk_cache(model, tmp_path)
    saved(disk, model, tokens)
    assert disk.find([*tokens[:99], 3, 1, 4]) is None
    assert disk.find(tokens) is None, "no token would be left to compute"
    assert disk.find([*tokens, 1]) is not None


def test_an_unfilled_window_can_be_trimmed(tmp_path: Path, monkeypatch: Any) -> None:
    """A window can be trimmed until it wraps around, and is stored as it is at that moment."""
    monkeypatch.setattr(cache_module, "LEAST_TOKENS", 4)
    model, tokens = model_of("window"), words(20)
    disk = disk_cache(model, tmp_path)
    saved(disk, model, tokens)
    row, length = restored(disk, model, [*tokens[:11], 3, 1])
    assert length == 11
    assert greedy(model, row, [3, 1], 8) == greedy(
        model, kv.new_row(model), [*tokens[:11], 3, 1], 8
    )


@pytest.mark.parametrize("kind", KINDS)
def test_later_changes_to_a_row_do_not_reach_its_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row and its clones continue to grow in the same buffers while the disk is slow."""
    gate = threading.Event()

    def slowly(*entry: Any) -> None:
        assert gate.wait(PATIENCE)
        write_file(*entry)

    monkeypatch.setattr(folder_module, "write_file", slowly)
    model, tokens = model_of(kind), words(100)
    disk = disk_cache(model, tmp_path)
    row = filled(model, tokens)
    disk.save(tokens, row, trimmable=kv.can_trim(row))
    twin = kv.clone(row)
    feed(model, row, words(40, 2))
    feed(model, twin, words(40, 9))
    gate.set()
    assert disk.drain(PATIENCE)
    back, _ = restored(disk, model, [*tokens, 1])
    assert same(back, filled(model, tokens))


def test_short_prefixes_and_small_gains_do_not_use_the_disk(tmp_path: Path) -> None:
    model = model_of("full")
    disk = disk_cache(model, tmp_path)
    saved(disk, model, words(LEAST_TOKENS - 1))
    assert not entries_in(tmp_path)
    tokens = words(LEAST_TOKENS + 30)
    saved(disk, model, tokens)
    assert disk.find([*tokens, 1], in_memory=31) is None
    assert disk.find([*tokens, 1], in_memory=30) is not None
    assert disk.find([*tokens[: LEAST_TOKENS - 1], 95, 95]) is None


def test_a_requests_own_folder_serves_only_requests_that_name_it(tmp_path: Path) -> None:
    model, first, second = model_of("full"), words(100), words(120, 5)
    disk = disk_cache(model, None)
    own = tmp_path / "chat"
    saved(disk, model, first, own)
    assert disk.find([*first, 1]) is None
    assert disk.find([*first, 1], path=own) is not None
    again = disk_cache(model, tmp_path / "folder")
    assert again.find([*first, 1], path=own) is not None
    saved(again, model, second, own)
    assert again.find([*first, 1], path=own) is not None
    assert again.find([*second, 1], path=own) is not None
    before = entries_in(own)
    saved(again, model, second[:80], own)
    assert entries_in(own) == before, "what the folder serves already is not written again"
    assert not entries_in(tmp_path / "folder")


def test_an_entry_of_a_requests_own_folder_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = model_of("full"), words(100)
    disk = disk_cache(model, None)
    saved(disk, model, tokens, tmp_path)
    looked: list[Path] = []

    def counted(path: Path, identity: str) -> Prefix:
        looked.append(path)
        return read_prefix(path, identity)

    monkeypatch.setattr(folder_module, "read_prefix", counted)
    for _ in range(3):
        assert disk.find([*tokens, 1], path=tmp_path) is not None
    assert len(looked) == 1


def test_the_bytes_waiting_to_be_restored_are_limited(tmp_path: Path) -> None:
    model = model_of("full")
    disk = disk_cache(model, tmp_path, max_waiting=1)
    saved(disk, model, words(100))
    found = disk.find([*words(100), 1])
    assert found is not None, "one may be of any size"
    assert disk.find([*words(100), 1]) is None
    del found
    assert disk.find([*words(100), 1]) is not None


def test_a_disk_that_does_not_answer_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = model_of("full"), [*words(100), 1]
    disk = disk_cache(model, tmp_path)
    saved(disk, model, prompt[:-1])
    answers, asked = threading.Event(), threading.Semaphore(0)

    def wait(folder: Folder) -> list[PrefixFile]:
        asked.release()
        answers.wait(PATIENCE)
        return refresh(folder)

    refresh = Folder.refresh
    monkeypatch.setattr(Folder, "refresh", wait)
    monkeypatch.setattr(cache_module, "_SEARCH_SECONDS", 0.01)
    assert disk.find(prompt) is None
    monkeypatch.setattr(cache_module, "_SEARCH_SECONDS", PATIENCE)
    assert disk.find(prompt) is None, "the first search still waits"
    assert [record.message for record in caplog.records] == [
        "prompt caches are not read until the disk answers again"
    ]
    answers.set()
    until(lambda: disk.find(prompt) is not None)
    assert disk.read_bytes == 0, "what the first search read late is given up"
    assert asked.acquire(blocking=False)


@pytest.mark.usefixtures("each_order")
def test_a_file_is_read_only_if_memory_is_free_for_it(tmp_path: Path) -> None:
    model, prompt = model_of("full"), words(600)
    disk = disk_cache(model, tmp_path)
    saved(disk, model, prompt[:-1])
    rounds = Rounds(engine_model(model, disk=disk, memory_limit=kv.cost(model).of(1400)))
    planner = rounds.scheduler.planner
    first = disk.find(prompt, free=planner.unused)
    assert first is not None
    room = 2 * disk.read_bytes - 1
    assert disk.find(prompt, free=room) is None, "the first one is still in memory"
    del first
    assert disk.find(prompt, free=room) is not None
    rounds.submit(1, words(900, 5), 60, ignore_eos=True)
    rounds.step()
    assert disk.find(prompt, free=planner.unused) is None
    rounds.drain()
    assert disk.find(prompt, free=planner.unused) is not None


TINY = Path(__file__).parents[2] / "models" / "tiny_text"
ALL = DiskUse(answer=True)


class Process:
    """A model with a disk cache, as in a process that has just started."""

    def __init__(self, kind: str, folder: Path | None, **changes: Any) -> None:
        self.disk = disk_cache(model_of(kind), folder)
        self.rounds = Rounds(engine_model(model_of(kind), disk=self.disk, **changes))
        self.without_disk = engine_model(model_of(kind))
        self.tickets = 0

    def ask(self, prompt: Sequence[int], use: DiskUse = ALL, limit: int = 6) -> Received:
        """Send a request as the engine does, with what the disk has for it."""
        self.tickets += 1
        in_memory = self.rounds.scheduler.planner.entries.index.find(PrefixKey(prompt)).length
        stored = self.disk.find(prompt, path=use.path, in_memory=in_memory)
        self.rounds.received[self.tickets] = Received()
        wanted = GenerationRequest(str(self.tickets), RawPrompt(""), disk=use)
        self.rounds.scheduler.submit(
            Submit(1, self.tickets, wanted, list(prompt), limit, stored=stored)
        )
        self.rounds.drain()
        assert self.disk.drain(PATIENCE)
        received = self.rounds.received[self.tickets]
        assert received.finished is not None
        assert received.tokens == alone(self.without_disk, prompt, limit).tokens
        return received


def cached(received: Received) -> int:
    assert received.finished is not None
    return received.finished.usage.cached_tokens


@pytest.mark.usefixtures("each_order")
@pytest.mark.parametrize("memory", [0, 1 << 26])
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_continues_after_a_restart(kind: str, memory: int, tmp_path: Path) -> None:
    prompt = words(120)
    received = Process(kind, tmp_path, prompt_cache_bytes=memory).ask(prompt)
    more = [*prompt, *received.tokens, 7, 8, 9]
    restarted = Process(kind, tmp_path, prompt_cache_bytes=memory)
    first = cached(restarted.ask(more))
    # KV that cannot be trimmed and has taken the end token continues from the prompt only.
    whole = len(prompt) + len(received.tokens)
    assert first >= (whole - 1 if kind in TRIMMABLE else len(prompt) - 1)
    again = cached(Process(kind, tmp_path, prompt_cache_bytes=memory).ask(prompt))
    assert again == len(prompt) - 1, "the same prompt runs its last token only"


def test_only_the_prompt_is_stored_if_so_requested(tmp_path: Path) -> None:
    prompt = words(100)
    own = tmp_path / "own"
    received = Process("full", None).ask(prompt, DiskUse(own))
    other = Process("full", None)
    assert cached(other.ask([*prompt, *received.tokens, 5], DiskUse(own, read_only=True))) == 99
    assert not entries_in(tmp_path)


def test_a_read_only_request_writes_nothing(tmp_path: Path) -> None:
    Process("full", tmp_path).ask(words(100), DiskUse(answer=True, read_only=True))
    assert not entries_in(tmp_path)


@pytest.mark.parametrize("use", [DiskUse(), ALL])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_copied_if_there_is_no_file(
    kind: str, use: DiskUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(kind, None, prompt_cache_bytes=0)
    copied: list[int] = []
    extract = kv.BatchCache.extract

    def counted(cache: kv.BatchCache, place: int) -> kv.RowCache:
        copied.append(place)
        return extract(cache, place)

    monkeypatch.setattr(kv.BatchCache, "extract", counted)
    process.ask(words(100), use)
    assert not copied


def test_memory_is_searched_before_the_disk(tmp_path: Path) -> None:
    process = Process("full", tmp_path)
    prompt = words(100)
    process.ask(prompt)
    for path in entries_in(tmp_path):
        path.unlink()
    assert cached(process.ask(prompt)) == 99


@pytest.mark.usefixtures("each_order")
def test_a_prompt_that_had_to_wait_may_leave_no_room_beside_its_file(tmp_path: Path) -> None:
    """Otherwise it would wait for ever: only its start frees the memory of its file's KV."""
    model, prompt = model_of("full"), words(600)
    disk = disk_cache(model, tmp_path)
    saved(disk, model, prompt[:-1])
    room = kv.cost(model).of(900)
    rounds = Rounds(engine_model(model, disk=disk, slots=1, memory_limit=room))
    rounds.submit(1, [1, 2, 3], 5)
    rounds.submit(2, prompt, 5, stored=disk.find(prompt))
    rounds.drain()
    assert disk.read_bytes == 0
    assert rounds.received[2].tokens == alone(engine_model(model), prompt, 5).tokens
    assert cached(rounds.received[2]) == 599


@pytest.mark.usefixtures("each_order")
def test_a_prompt_does_not_wait_for_ever_for_memory_that_a_disk_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, goes_on = model_of("full"), threading.Event()
    disk = disk_cache(model, tmp_path)
    monkeypatch.setattr(folder_module, "write_file", lambda *_, **__: goes_on.wait(PATIENCE))
    room = kv.cost(model).of(900)
    rounds = Rounds(engine_model(model, disk=disk, memory_limit=room, prompt_cache_bytes=0))
    now = 1000.0
    monkeypatch.setattr(rounds.scheduler, "_now", lambda: now)
    rounds.submit(1, words(600), 1, disk=ALL)
    rounds.drain()
    rounds.submit(2, words(600, 5), 2)
    for _ in range(3):
        rounds.step()
    assert rounds.tickets("waiting") == [2]
    now += 100
    rounds.drain(50)
    assert isinstance(rounds.received[2].error, Overloaded)
    assert "the disk does not finish" in str(rounds.received[2].error)
    rounds.submit(3, words(50, 7), 2)
    rounds.drain()
    assert rounds.received[3].finished is not None
    goes_on.set()
    assert disk.drain(PATIENCE)


async def test_the_engine_says_how_much_memory_is_free_for_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[float] = []
    find = DiskCache.find

    def noted(disk: DiskCache, prompt: Sequence[int], **known: Any) -> StoredPrefix | None:
        rooms.append(known["free"])
        return find(disk, prompt, **known)

    monkeypatch.setattr(DiskCache, "find", noted)
    settings = {"prompt_cache_dir": str(tmp_path), "memory_limit_mib": 100}
    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest("tiny", str(TINY), settings=settings))
        request = GenerationRequest("one", RawPrompt("Hello!"), max_tokens=4)
        async with engine.submit(request) as generation:
            assert [event async for event in generation]
    finally:
        await engine.stop(10)
    assert len(rooms) == 1
    assert 0 < rooms[0] < 100 * MIB
