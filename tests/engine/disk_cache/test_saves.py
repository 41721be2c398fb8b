"""The queue in front of the disk: bounded, without useless work, and over in time."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from numpy.typing import NDArray

from backend.engine import kv
from backend.engine.disk_cache import layers
from backend.engine.disk_cache.entry_file import Head
from backend.engine.disk_cache.layers import PackedRow
from backend.engine.disk_cache.saves import Save, SaveQueue
from tests.engine.disk_cache.rows import (
    IDENTITY,
    PATIENCE,
    disk_cache,
    entries_in,
    filled,
    model_of,
    words,
)


class Slow:
    """A disk thread that is held at a gate, and what it has written."""

    def __init__(self, max_bytes: int = 100) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.written: list[str] = []
        self.queue = SaveQueue(self.write, max_bytes)

    def write(self, save: Save) -> None:
        self.begun.set()
        while not self.gate.wait(0.01):
            if self.queue.abandoned:
                return
        self.written.append(shown(save))

    def hold(self) -> None:
        """Have one save under way, so that the next ones wait."""
        assert self.queue.put(save_of("zz", size=1))
        assert self.begun.wait(PATIENCE)

    def rest(self) -> list[str]:
        """Open the gate; what was written after the one that was under way."""
        self.gate.set()
        assert self.queue.drain(PATIENCE)
        return self.written[1:]


def save_of(text: str, size: int = 10, path: Path | None = None, *, trimmable: bool = True) -> Save:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return Save(tokens, Head(IDENTITY, trimmable, ()), PackedRow((), ()), size, path)


def thread_of(queue: SaveQueue) -> threading.Thread | None:
    return queue._thread


def shown(save: Save) -> str:
    return bytes(save.tokens.astype(np.uint8)).decode()


def test_what_does_not_fit_is_dropped_and_what_waits_stays() -> None:
    slow = Slow(max_bytes=25)
    slow.hold()
    assert [slow.queue.put(save_of(text)) for text in "abc"] == [True, True, False]
    assert slow.queue.nbytes == 21
    assert slow.rest() == ["a", "b"]
    assert slow.queue.nbytes == 0


def test_one_save_may_be_larger_than_the_bound() -> None:
    slow = Slow(max_bytes=5)
    slow.gate.set()
    assert slow.queue.put(save_of("a", size=50))
    assert slow.queue.drain(PATIENCE)
    assert slow.written == ["a"]


def test_a_conversation_that_grows_while_it_waits_is_written_once() -> None:
    slow = Slow(max_bytes=31)
    slow.hold()
    assert slow.queue.put(save_of("ab"))
    assert slow.queue.put(save_of("x"))
    assert slow.queue.put(save_of("abc", size=20))
    assert slow.queue.put(save_of("abc", size=20)), "it waits already"
    assert slow.queue.put(save_of("a")), "it is the beginning of what waits"
    assert slow.rest() == ["x", "abc"]


def test_checkpoints_do_not_replace_each_other() -> None:
    slow = Slow()
    slow.hold()
    for text in ("ab", "abc"):
        assert slow.queue.put(save_of(text, trimmable=False))
    assert slow.rest() == ["ab", "abc"]


def test_of_saves_for_one_file_the_last_is_written() -> None:
    slow = Slow()
    slow.hold()
    for text, path in (("a", "one"), ("b", "two"), ("c", "one"), ("d", None), ("e", None)):
        assert slow.queue.put(save_of(text, path=Path(path) if path else None))
    assert slow.rest() == ["b", "c", "d", "e"]


def test_a_close_with_time_writes_everything_and_takes_no_more() -> None:
    slow = Slow()
    slow.gate.set()
    for text in "abc":
        assert slow.queue.put(save_of(text))
    slow.queue.close(PATIENCE)
    assert slow.written == ["a", "b", "c"]
    assert not slow.queue.put(save_of("d"))


def test_a_close_without_time_gives_up() -> None:
    slow = Slow()
    slow.hold()
    assert slow.queue.put(save_of("a"))
    slow.queue.close(0)
    slow.queue.close(0)
    assert slow.queue.drain(PATIENCE)
    assert slow.written == []


def test_a_thread_is_there_only_while_there_is_work() -> None:
    slow = Slow()
    assert thread_of(slow.queue) is None
    slow.hold()
    assert thread_of(slow.queue) is not None
    assert slow.rest() == []
    assert thread_of(slow.queue) is None
    slow.queue.put_chore(lambda: slow.written.append("chore"))
    assert slow.queue.drain(PATIENCE)
    assert slow.written == ["zz", "chore"]
    slow.queue.close(PATIENCE)
    slow.queue.put_chore(lambda: slow.written.append("too late"))
    assert slow.written == ["zz", "chore"]


def test_a_queue_that_nobody_holds_finishes_and_is_gone() -> None:
    slow = Slow()
    slow.hold()
    written, gate = slow.written, slow.gate
    assert slow.queue.put(save_of("a"))
    queue, thread = weakref.ref(slow.queue), thread_of(slow.queue)
    assert thread is not None
    del slow
    gate.set()
    thread.join(PATIENCE)
    assert written == ["zz", "a"]
    gc.collect()
    assert queue() is None


def test_an_abandoned_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is told to stop in the middle of a file."""
    model, disk = model_of("full"), disk_cache(model_of("full"), tmp_path)
    begun, go_on = threading.Event(), threading.Event()
    buffers = layers.buffers

    def held(packed: PackedRow) -> Iterator[NDArray[Any]]:
        for array in buffers(packed):
            yield array
            begun.set()
            assert go_on.wait(PATIENCE)

    monkeypatch.setattr(layers, "buffers", held)
    disk.save(words(64), filled(model, words(64)), trimmable=True)
    assert begun.wait(PATIENCE)
    disk.close(0)
    go_on.set()
    assert disk.drain(PATIENCE)
    assert not list(tmp_path.iterdir())


def test_what_waits_outlives_the_engine_thread(tmp_path: Path) -> None:
    """At the end of the process the engine thread goes first, and its streams with it."""
    gate = threading.Event()
    disk = disk_cache(model_of("full"), tmp_path)
    disk._queue.put_chore(lambda: assert_opened(gate))

    def engine() -> None:
        row = [KVCache()]
        row[0].update_and_fetch(*(mx.random.normal((1, 2, 64, 8)) for _ in range(2)))
        kv.evaluate(row)
        disk.save(words(64), row * 2, trimmable=True)
        mx.clear_streams()

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join(PATIENCE)
    assert not entries_in(tmp_path)
    gate.set()
    disk.close(PATIENCE)
    assert disk_cache(model_of("full"), tmp_path).find([*words(64), 1]) is not None


def assert_opened(gate: threading.Event) -> None:
    assert gate.wait(PATIENCE)
