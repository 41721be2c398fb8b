"""A written file can be read; one that is damaged, foreign or hostile is a cache miss.

It costs at most one line in the log.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.engine.caching import kv
from backend.engine.disk_cache.entry_file import (
    MAGIC,
    BadEntry,
    Head,
    entry_size,
    open_entry,
    read_arrays,
    read_head,
    write_entry,
)
from backend.engine.disk_cache.layout import ArraySpec, StoredLayer
from tests.engine.disk_cache.rows import (
    IDENTITY,
    disk_cache,
    entries_in,
    filled,
    model_of,
    saved,
    words,
)
from tests.long import examples


def framed(text: bytes, rest: bytes = b"") -> bytes:
    """A file with this header and right checksums."""
    front = MAGIC + len(text).to_bytes(4, "little") + text
    first = zlib.crc32(front)
    return (
        front + first.to_bytes(4, "little") + rest + zlib.crc32(rest, first).to_bytes(4, "little")
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)
HEADS = st.fixed_dictionaries(
    {
        "identity": JSON | st.just(IDENTITY),
        "tokens": JSON | st.just(0),
        "trimmable": JSON,
        "layers": JSON
        | st.lists(
            st.tuples(
                st.just("KVCache") | JSON,
                st.just([0]) | JSON,
                st.lists(st.tuples(st.just("float32") | JSON, JSON | st.lists(st.integers()))),
            )
        ),
    }
)


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200) | HEADS.map(lambda head: json.dumps(head).encode()))
def test_any_header_is_accepted_or_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "entry"
    path.write_bytes(framed(text))
    with open_entry(path) as file:
        try:
            opened = read_head(file)
            read_arrays(file, opened)
        except BadEntry:
            return
        assert opened.size == path.stat().st_size


@pytest.mark.parametrize(
    "head",
    [
        b"[" * 100_000,
        b'{"identity":"a","tokens":99999999999,"trimmable":true,"layers":[]}',
        (
            b'{"identity":"a","tokens":0,"trimmable":true,"layers":'
            b'[["KVCache",[],[["float32",[281474976710656,281474976710656]]]]]}'
        ),
    ],
)
def test_a_header_cannot_request_more_than_the_file_holds(head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "entry"
    path.write_bytes(framed(head))
    with open_entry(path) as file, pytest.raises(BadEntry):
        read_arrays(file, read_head(file))


def test_a_length_beyond_the_file_reads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    path.write_bytes(MAGIC + b"\xff\xff\xff\xff" + b"x" * 100)
    with open_entry(path) as file, pytest.raises(BadEntry, match="its header is damaged"):
        read_head(file)


def test_a_written_entry_can_be_read(tmp_path: Path) -> None:
    spec = ArraySpec("bfloat16", (1, 2, 3))
    head = Head(IDENTITY, False, (StoredLayer("KVCache", (3,), (spec,)),))
    array = np.arange(6, dtype=np.uint16).reshape(1, 2, 3)
    tokens = np.array([5, 6, 7], np.int32)
    write_entry(tmp_path / "entry", head, tokens, [array])
    assert (tmp_path / "entry").stat().st_size == entry_size(head, tokens)
    with open_entry(tmp_path / "entry") as file:
        opened = read_head(file)
        (back,) = read_arrays(file, opened)
    assert opened.head == head
    assert opened.tokens.tolist() == [5, 6, 7]
    assert (back == array).all()


PROMPT = [*words(100), 1]
LOGGER = "backend.engine.disk_cache"


def stored(folder: Path) -> tuple[Path, bytes]:
    """The one entry of a folder, and its bytes."""
    saved(disk_cache(model_of("full"), folder), model_of("full"), PROMPT[:-1])
    (path,) = entries_in(folder)
    return path, path.read_bytes()


def rewritten(folder: Path, head: Callable[[Head], Head]) -> None:
    """Replace the only entry by one with a changed header, matching arrays, and right checksums."""
    path, _ = stored(folder)
    with open_entry(path) as file:
        opened = read_head(file)
    changed = head(opened.head)
    carriers = {2: np.uint16, 4: np.uint32}
    arrays = [
        np.zeros(array.shape, carriers[2 if "16" in array.dtype else 4]) for array in changed.arrays
    ]
    write_entry(path, changed, opened.tokens, arrays)


def finds(folder: Path) -> bool:
    """Whether a newly started process finds an entry in the folder."""
    return disk_cache(model_of("full"), folder).find(PROMPT) is not None


def test_any_flipped_bit_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, whole = stored(tmp_path)
    assert finds(tmp_path)
    dice = random.Random(3)
    places = {*range(24), *range(len(whole) - 8, len(whole))}
    places |= {dice.randrange(len(whole)) for _ in range(150)}
    for place in sorted(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        caplog.clear()
        assert not finds(tmp_path), place
        lines = [record for record in caplog.records if record.name.startswith(LOGGER)]
        assert len(lines) == 1, place
        assert str(tmp_path) not in lines[0].getMessage()


def test_any_other_length_is_a_miss(tmp_path: Path) -> None:
    path, whole = stored(tmp_path)
    dice = random.Random(4)
    for length in {0, 1, 8, 11, 12, 13, *(dice.randrange(len(whole)) for _ in range(60))}:
        path.write_bytes(whole[:length])
        assert not finds(tmp_path), length
    path.write_bytes(whole + b"\0")
    assert not finds(tmp_path)
    path.write_bytes(whole)
    assert finds(tmp_path)


def test_a_symbolic_link_is_not_followed_even_to_an_entry(tmp_path: Path) -> None:
    path, whole = stored(tmp_path / "elsewhere")
    link = tmp_path / "folder" / path.name
    link.parent.mkdir()
    link.symlink_to(path)
    assert not finds(link.parent)
    saved(disk_cache(model_of("full"), link.parent, max_bytes=1), model_of("full"), words(64))
    assert link.is_symlink()
    assert path.read_bytes() == whole


def other_layer(**changes: Any) -> Callable[[Head], Head]:
    def change(head: Head) -> Head:
        first, *rest = head.layers
        return dataclasses.replace(head, layers=(dataclasses.replace(first, **changes), *rest))

    return change


def other_array(**changes: Any) -> Callable[[Head], Head]:
    def change(head: Head) -> Head:
        first, *rest = head.layers[0].arrays
        arrays = (dataclasses.replace(first, **changes), *rest)
        return other_layer(arrays=arrays)(head)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda head: dataclasses.replace(head, identity="f" * 32),
        lambda head: dataclasses.replace(head, layers=head.layers[:1]),
        lambda head: dataclasses.replace(head, layers=head.layers * 2),
        lambda head: dataclasses.replace(head, layers=()),
        other_layer(kind="RotatingKVCache"),
        other_layer(kind="os.system"),
        other_layer(scalars=()),
        other_layer(scalars=(99,)),
        other_layer(scalars=(1 << 40,)),
        other_layer(arrays=()),
        other_array(dtype="float16"),
        other_array(dtype="int32"),
        other_array(shape=(1, 2, 100, 16)),
        other_array(shape=(1, 4, 100, 8)),
        other_array(shape=(1, 2, 99, 8)),
        other_array(shape=(1, 2, 100, 8, 1)),
        other_array(shape=(1600,)),
        other_array(shape=()),
    ],
)
def test_a_valid_file_with_foreign_content_is_a_miss(
    change: Callable[[Head], Head], tmp_path: Path
) -> None:
    rewritten(tmp_path, change)
    assert not finds(tmp_path)


def test_rewriting_a_header_without_a_change_is_a_hit(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda head: head)
    assert finds(tmp_path)


@pytest.mark.parametrize("kind", ["window", "hybrid", "recurrent", "quantised", "bfloat16"])
def test_rows_of_one_model_never_reach_another(kind: str, tmp_path: Path) -> None:
    """If two models had the same digest, their layouts would still differ."""
    model = model_of(kind)
    saved(disk_cache(model, tmp_path), model, PROMPT[:-1])
    assert disk_cache(model, tmp_path).find(PROMPT) is not None
    assert not finds(tmp_path)
    assert disk_cache(model, tmp_path, identity="f" * 32).find(PROMPT) is None


def test_a_requests_own_file_of_another_model_is_a_miss_and_is_replaced(tmp_path: Path) -> None:
    model, own = model_of("full"), tmp_path / "own"
    saved(disk_cache(model, None, identity="f" * 32), model, PROMPT[:-1], own)
    disk = disk_cache(model, None)
    assert disk.find(PROMPT, path=own) is None
    saved(disk, model, PROMPT[:-1], own)
    assert disk.find(PROMPT, path=own) is not None


@pytest.mark.parametrize("make", ["text", "empty", "folder", "link", "pipe", "nothing"])
def test_a_path_that_is_not_a_file_is_not_touched(make: str, tmp_path: Path) -> None:
    own, precious = tmp_path / "own", tmp_path / "precious"
    precious.write_text("do not touch")
    match make:
        case "text":
            own.write_text("do not touch")
        case "empty":
            own.touch()
        case "folder":
            own.mkdir()
        case "link":
            own.symlink_to(precious)
        case "pipe":
            os.mkfifo(own)
        case _:
            own = tmp_path / "no folder" / "own"
    before = own.lstat() if make != "nothing" else None
    model, disk = model_of("full"), disk_cache(model_of("full"), None)
    assert disk.find(PROMPT, path=own) is None
    saved(disk, model, PROMPT[:-1], own)
    assert disk.find(PROMPT, path=own) is None
    assert precious.read_text() == "do not touch"
    if before is None:
        assert not own.parent.exists()
    else:
        after = own.lstat()
        assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
        assert after.st_size == before.st_size


def test_a_file_damaged_between_lookup_and_use_is_a_miss(tmp_path: Path) -> None:
    path, whole = stored(tmp_path)
    disk = disk_cache(model_of("full"), tmp_path)
    damaged = bytearray(whole)
    damaged[-100] ^= 1
    path.write_bytes(damaged)
    assert disk.find(PROMPT) is None
    saved(disk, model_of("full"), PROMPT[:-1])
    assert disk.find(PROMPT) is not None, "a damaged entry is written again"


def test_a_failed_restore_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(tmp_path)
    disk = disk_cache(model_of("full"), tmp_path)
    found = disk.find(PROMPT)
    assert found is not None
    with caplog.at_level(logging.WARNING):
        assert disk.restore(found, filled(model_of("hybrid"), [1])[:1]) is None
    assert disk.restore(found, kv.new_row(model_of("full"))) is not None
