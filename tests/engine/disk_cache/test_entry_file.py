"""The form of a file: what is written can be read, and a head cannot lead anywhere."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from tests.engine.disk_cache.rows import IDENTITY


def framed(text: bytes, rest: bytes = b"") -> bytes:
    """A file with this head and right checksums."""
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


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200) | HEADS.map(lambda head: json.dumps(head).encode()))
def test_whatever_a_head_says_is_at_most_refused(tmp_path: Path, text: bytes) -> None:
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
def test_a_head_cannot_ask_for_more_than_the_file_holds(head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "entry"
    path.write_bytes(framed(head))
    with open_entry(path) as file, pytest.raises(BadEntry):
        read_arrays(file, read_head(file))


def test_a_length_beyond_the_file_reads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    path.write_bytes(MAGIC + b"\xff\xff\xff\xff" + b"x" * 100)
    with open_entry(path) as file, pytest.raises(BadEntry, match="damaged at its head"):
        read_head(file)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    spec = ArraySpec("bfloat16", (1, 2, 3))
    head = Head(IDENTITY, False, (StoredLayer("KVCache", (3,), (spec,)),))
    array = np.arange(6, dtype=np.uint16).reshape(1, 2, 3)
    tokens = np.array([5, 6, 7], np.int32)
    with (tmp_path / "entry").open("wb") as out:
        write_entry(out, head, tokens, [array], lambda: False)
    assert (tmp_path / "entry").stat().st_size == entry_size(head, tokens)
    with open_entry(tmp_path / "entry") as file:
        opened = read_head(file)
        (back,) = read_arrays(file, opened)
    assert opened.head == head
    assert opened.tokens.tolist() == [5, 6, 7]
    assert (back == array).all()
