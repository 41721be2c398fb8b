"""Which entries serve a prompt, and a folder that is limited, shared, and has foreign files."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.caching import kv
from backend.engine.disk_cache import prefix_folder as folder_module
from backend.engine.disk_cache.prefix_folder import (
    Folder,
    Prefix,
    PrefixFile,
    candidates,
    write_file,
)
from backend.engine.planning.prefix_index import PrefixKey
from common.prefixes import common_prefix
from tests.engine.disk_cache.rows import (
    IDENTITY,
    PATIENCE,
    disk_cache,
    entries_in,
    filled,
    model_of,
    saved,
    words,
)

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
STORED = st.lists(st.tuples(TEXTS, st.booleans(), st.integers(1, 5)), max_size=12)
OTHER = "f" * 32
SIZES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=12)


def tokens(entry: PrefixFile) -> list[int]:
    ids: list[int] = entry.prefix.key.tokens.tolist()
    return ids


def entries(stored: list[tuple[list[int], bool, int]]) -> list[PrefixFile]:
    return [
        PrefixFile(Path(str(at)), Prefix(PrefixKey(text), trimmable), size)
        for at, (text, trimmable, size) in enumerate(stored)
    ]


def spared(stored: list[int], trimmable: bool, prompt: list[int]) -> int:
    """How many tokens of the prompt the entry can give, at most all but the last."""
    lengths = range(len(stored) + 1) if trimmable else [len(stored)]
    return max([n for n in lengths if n < len(prompt) and stored[:n] == prompt[:n]], default=0)


@given(STORED, TEXTS, st.integers(0, 4))
def test_candidates_are_ordered_by_the_tokens_they_save(
    stored: list[tuple[list[int], bool, int]], prompt: list[int], more_than: int
) -> None:
    found = candidates(entries(stored), PrefixKey(prompt), more_than, 1, math.inf)
    lengths = [spared(tokens(entry), entry.prefix.trimmable, prompt) for entry in found]
    expected = [spared(text, trimmable, prompt) for text, trimmable, _ in stored]
    assert lengths == sorted((n for n in expected if n > more_than), reverse=True)
    order = [(-length, entry.size) for length, entry in zip(lengths, found, strict=True)]
    assert order == sorted(order), "of equals the smaller file comes first"
    for length, entry in zip(lengths, found, strict=True):
        assert entry.prefix.reusable(PrefixKey(prompt)) == length


def test_a_file_has_to_spare_more_than_it_costs() -> None:
    """A file is read completely, so a long one is not worth reading for a few common tokens."""
    (long,) = entries([(words(3200), True, 9)])
    prompt = PrefixKey([*words(3200)[:230], 95, 95])
    assert candidates([long], prompt, 0, 64, math.inf) == [long]
    assert candidates([long], prompt, 30, 64, math.inf) == [long]
    assert candidates([long], prompt, 31, 64, math.inf) == []
    assert candidates([long], prompt, 0, 64, 8) == [], "it is too large"


@given(STORED, TEXTS, st.booleans(), TEXTS)
def test_a_covered_entry_would_have_served_no_prompt_better(
    stored: list[tuple[list[int], bool, int]], text: list[int], trimmable: bool, prompt: list[int]
) -> None:
    new = Prefix(PrefixKey(text), trimmable)
    for entry in entries(stored):
        if entry.prefix.covers(new):
            mine = spared(text, trimmable, prompt)
            assert spared(tokens(entry), entry.prefix.trimmable, prompt) >= mine


def test_a_longer_text_covers_its_prefix() -> None:
    shorter, short, longer = (Prefix(PrefixKey([1, 2, 0][:n]), True) for n in (1, 2, 3))
    assert longer.covers(short)
    assert short.covers(shorter)
    assert not short.covers(longer)
    whole = Prefix(short.key, False)
    assert whole.covers(Prefix(short.key, False))
    assert not whole.covers(short)
    assert not whole.covers(shorter)


@settings(max_examples=30)
@given(SIZES, st.integers(0, 60), st.integers(0, 200))
def test_eviction_removes_only_as_much_as_needed(
    sizes: list[tuple[int, int]], needed: int, bound: int
) -> None:
    with TemporaryDirectory() as name:
        paths = [Path(name) / f"{OTHER}-{at:032x}.safetensors" for at in range(len(sizes))]
        for path, (size, used) in zip(paths, sizes, strict=True):
            path.write_bytes(b"x" * size)
            os.utime(path, (used, used))
        Folder(Path(name), IDENTITY, [], bound).evict(needed)
        stays = [path.exists() for path in paths]
    staying = [facts for facts, stay in zip(sizes, stays, strict=True) if stay]
    going = [facts for facts, stay in zip(sizes, stays, strict=True) if not stay]
    left = sum(size for size, _ in staying) + needed
    assert left <= bound or not staying
    if going:
        last = max(going, key=lambda facts: (facts[1], facts[0]))
        assert left + last[0] > bound, "the last one need not have gone"
    assert all(gone[1] <= stayed[1] for gone in going for stayed in staying)


SIZE = 4 * 4 * 2 * 8 * 64  # bytes of the arrays of 64 tokens of the model: 2 layers, K and V


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def age(folder: Path) -> None:
    """Make everything in the folder older by a minute: file systems' clocks are coarse."""
    for path in entries_in(folder):
        used = path.stat().st_mtime - 60
        os.utime(path, (used, used))


CONVERSATIONS = st.tuples(st.integers(1, 3), st.integers(64, 90), st.integers(0, 3)).map(
    lambda text: words(text[1], text[0])[: text[1] - text[2]] + [90 + text[2]] * text[2]
)


@settings(max_examples=20)
@given(st.lists(CONVERSATIONS, min_size=1, max_size=6), st.integers(1, 5), CONVERSATIONS)
def test_the_limit_holds_and_the_best_entry_is_found(
    texts: list[list[int]], room: int, prompt: list[int]
) -> None:
    model = model_of("full")
    with TemporaryDirectory() as name:
        folder = Path(name)
        disk = disk_cache(model, folder, max_bytes=room * SIZE * 7 // 4)
        for text in texts:
            saved(disk, model, text)
            assert total(folder) <= room * SIZE * 7 // 4
            assert disk.find([*text, 1]) is not None, "what was just stored is there"
            age(folder)
        for reader in (disk, disk_cache(model, folder)):
            found = reader.find(prompt)
            assert reader._folder is not None
            kept = [tokens(entry) for entry in reader._folder.refresh()]
            best = max(
                [min(common_prefix(text, prompt), len(prompt) - 1) for text in kept], default=0
            )
            assert (found.length if found else 0) == (best if best >= 64 else 0)
            assert all(text in texts for text in kept)


def test_the_last_used_entry_is_evicted_last(tmp_path: Path) -> None:
    model = model_of("full")
    disk = disk_cache(model, tmp_path, max_bytes=SIZE * 3)
    for start in (1, 2):
        saved(disk, model, words(64, start))
        age(tmp_path)
    assert disk.find([*words(64, 1), 1]) is not None
    saved(disk, model, words(64, 3))
    assert disk.find([*words(64, 2), 1]) is None
    assert disk.find([*words(64, 1), 1]) is not None
    age(tmp_path)
    # the entry exists: it counts as used, and is not written again
    saved(disk, model, words(64, 1))
    saved(disk, model, words(64, 4))
    assert disk.find([*words(64, 3), 1]) is None
    assert disk.find([*words(64, 1), 1]) is not None


def test_a_folder_that_can_only_be_read_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("full")
    disk = disk_cache(model, tmp_path)
    saved(disk, model, words(64))

    def refused(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refused)
    assert disk.find([*words(64), 1]) is not None


def test_entries_from_before_the_clock_was_set_back_are_evicted_first(tmp_path: Path) -> None:
    model = model_of("full")
    disk = disk_cache(model, tmp_path, max_bytes=SIZE * 3)
    for start in (1, 2):
        saved(disk, model, words(64, start))
    for path in entries_in(tmp_path):
        os.utime(path, (time.time() + 86_400,) * 2)
    for start in (3, 4):
        saved(disk, model, words(64, start))
        age(tmp_path)
    for start, found in ((1, False), (2, False), (3, True), (4, True)):
        assert (disk.find([*words(64, start), 1]) is not None) == found


def test_a_smaller_limit_applies_from_the_first_save(tmp_path: Path) -> None:
    model = model_of("full")
    disk = disk_cache(model, tmp_path)
    for start in (1, 2, 3):
        saved(disk, model, words(64, start))
        age(tmp_path)
    saved(disk_cache(model, tmp_path, identity=OTHER, max_bytes=SIZE * 3), model, words(64, 4))
    assert total(tmp_path) <= SIZE * 3
    assert disk.find([*words(64, 3), 1]) is not None, "the latest stays, of whatever model"
    assert disk.find([*words(64, 1), 1]) is None


def test_an_entry_larger_than_the_limit_evicts_nothing(tmp_path: Path) -> None:
    model = model_of("full")
    disk = disk_cache(model, tmp_path, max_bytes=SIZE * 7 // 4)
    saved(disk, model, words(64))
    saved(disk, model, words(200, 2))
    assert disk.find([*words(64), 1]) is not None
    assert len(entries_in(tmp_path)) == 1


def test_a_conversation_keeps_one_file(tmp_path: Path) -> None:
    model, disk = model_of("full"), disk_cache(model_of("full"), tmp_path)
    for length in (64, 80, 120, 100):
        saved(disk, model, words(length))
        assert len(entries_in(tmp_path)) == 1
    found = disk.find([*words(120), 1])
    assert found is not None
    assert found.length == 120


def test_checkpoints_of_kv_that_cannot_be_trimmed_coexist(tmp_path: Path) -> None:
    model, disk = model_of("hybrid"), disk_cache(model_of("hybrid"), tmp_path)
    for length in (64, 80):
        saved(disk, model, words(length))
    found = disk.find([*words(70), 1])
    assert found is not None
    assert found.length == 64


def test_two_caches_share_a_folder(tmp_path: Path) -> None:
    """Each sees what the other writes, and tolerates what the other removes."""
    model = model_of("full")
    one, two = disk_cache(model, tmp_path), disk_cache(model, tmp_path)
    saved(one, model, words(64, 1))
    assert two.find([*words(64, 1), 1]) is not None
    saved(two, model, words(90, 1))  # replaces the entry that `one` knows
    found = one.find([*words(90, 1), 1])
    assert found is not None
    assert found.length == 90
    for path in entries_in(tmp_path):
        path.unlink()
    assert one.find([*words(90, 1), 1]) is None
    saved(one, model, words(64, 1))
    assert two.find([*words(64, 1), 1]) is not None


def test_two_models_share_a_folder_and_no_entry(tmp_path: Path) -> None:
    model = model_of("full")
    one, two = disk_cache(model, tmp_path), disk_cache(model, tmp_path, identity=OTHER)
    saved(one, model, words(64))
    assert two.find([*words(64), 1]) is None
    saved(two, model, words(64))
    assert len(entries_in(tmp_path)) == 2
    assert one.find([*words(64), 1]) is not None
    assert two.find([*words(64), 1]) is not None


@pytest.mark.parametrize("room", [1, 2, 3])
def test_the_limit_holds_when_two_processes_write(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process begins a file; meanwhile the other makes room and writes its own."""
    begun, gate = threading.Event(), threading.Event()
    model, most = model_of("full"), room * SIZE * 7 // 4
    one, two = (disk_cache(model, tmp_path, max_bytes=most) for _ in range(2))

    def slowly(*entry: Any) -> None:
        begun.set()
        assert gate.wait(PATIENCE)
        write_file(*entry)

    for start in range(1, room):
        saved(one, model, words(64, start))
        age(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "write_file", slowly)
        one.save(words(64, 8), filled(model, words(64, 8)), trimmable=True)
        assert begun.wait(PATIENCE)
    saved(two, model, words(64, 9))
    assert total(tmp_path) <= most
    gate.set()
    assert one.drain(PATIENCE)
    assert total(tmp_path) <= most
    assert two.find([*words(64, 8), 1]) is not None
    assert (two.find([*words(64, 9), 1]) is not None) == (room > 1)


def test_many_threads_and_two_caches_at_once(tmp_path: Path) -> None:
    """Readers meet files that are replaced and evicted at the same time.

    Each read is a hit or a miss.
    """
    model = model_of("full")
    rows = {start: filled(model, words(64 + start, start % 3)) for start in range(9)}
    caches = [disk_cache(model, tmp_path, max_bytes=SIZE * 4) for _ in range(2)]
    wrong: list[object] = []
    done = threading.Event()

    def read(disk: int) -> None:
        while not done.is_set():
            for start in range(9):
                prompt = [*words(64 + start, start % 3), 1]
                found = caches[disk].find(prompt)
                if (
                    found
                    and found.prefix.key.tokens[: found.length].tolist() != prompt[: found.length]
                ):
                    wrong.append(found)

    readers = [threading.Thread(target=read, args=(at % 2,)) for at in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(60):
        start = turn * 5 % 9
        caches[turn % 2].save(words(64 + start, start % 3), rows[start], trimmable=True)
    assert all(disk.drain(PATIENCE) for disk in caches)
    done.set()
    for reader in readers:
        reader.join(PATIENCE)
    assert not wrong
    assert len(entries_in(tmp_path)) >= 1
    assert not list((tmp_path / ".unfinished").iterdir())


def test_foreign_files_stay_and_do_not_count(tmp_path: Path) -> None:
    notes, weights = tmp_path / "notes.txt", tmp_path / "model.safetensors"
    link = tmp_path / f"{IDENTITY}-{OTHER}.safetensors"
    notes.write_bytes(b"x" * SIZE * 9)
    weights.write_bytes(b"y" * SIZE * 9)
    link.symlink_to(notes)
    folder = tmp_path / f"{OTHER}-{OTHER}.safetensors"
    folder.mkdir()
    model = model_of("full")
    disk = disk_cache(model, tmp_path, max_bytes=SIZE * 3)
    for start in (1, 2, 3, 4):
        saved(disk, model, words(64, start))
    assert disk.find([*words(64, 4), 1]) is not None
    assert notes.stat().st_size == weights.stat().st_size == SIZE * 9
    assert not link.is_symlink(), "only this project gives such names"
    assert folder.is_dir()


def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    """The files contain conversations."""
    model, folder = model_of("full"), tmp_path / "folder"
    saved(disk_cache(model, folder), model, words(64))
    (path,) = entries_in(folder)
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_nothing_is_stored_without_room(tmp_path: Path) -> None:
    model = model_of("full")
    disk = disk_cache(model, None)
    row = filled(model, words(64))
    disk.save(words(64), row, trimmable=kv.can_trim(row))
    assert disk.writing_bytes == 0
    assert disk.find([*words(64), 1]) is None
