"""A written file can be read; one that is damaged, foreign or hostile is a cache miss.

It costs at most one line in the log.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from backend.engine.caching import kv
from backend.engine.disk_cache.prefix_folder import (
    Prefix,
    StoredPrefix,
    _check,
    _metadata,
    read_file,
    write_file,
)
from backend.engine.planning.prefix_index import PrefixKey
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

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)
FACTS = st.fixed_dictionaries(
    {
        "identity": JSON | st.just(IDENTITY),
        "trimmable": JSON,
        "numbers": JSON | st.lists(st.integers() | st.just(100), max_size=3),
    }
)


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(FACTS | JSON)
def test_any_facts_are_a_miss(tmp_path: Path, facts: Any) -> None:
    """They are not the layers of a model, whatever else they are."""
    tensors = {"tokens": np.array(PROMPT[:-1], np.int32)}
    write(tmp_path / NAME, tensors, json.dumps(facts))
    assert not finds(tmp_path)


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200))
def test_any_bytes_are_a_miss(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    assert not finds(tmp_path)
    assert not (tmp_path / NAME).exists()


def test_a_written_entry_can_be_read_here_and_by_mlx(tmp_path: Path) -> None:
    path = tmp_path / "entry.safetensors"
    array = mx.arange(6, dtype=mx.uint16).reshape(1, 2, 3)
    mx.eval(array)
    prefix = Prefix(PrefixKey([5, 6, 7]), False)
    write_file(path, IDENTITY, StoredPrefix(prefix, [array], [3]))
    stored = read_file(path, IDENTITY)
    (back,) = stored.arrays
    assert stored.numbers == [3]
    assert stored.prefix.key.tokens.tolist() == [5, 6, 7]
    assert not stored.prefix.trimmable
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    assert back.tolist() == loaded["0"].tolist() == array.tolist()


PROMPT = [*words(100), 1]
LOGGER = "backend.engine.disk_cache"
NAME = f"{IDENTITY}-{'f' * 32}.safetensors"


def write(path: Path, tensors: dict[str, Any], facts: str) -> None:
    """Write a file with a right checksum."""
    save_file(tensors, path, {"facts": facts, "check": _check(facts, tensors)})


def stored(folder: Path) -> tuple[Path, bytes]:
    """The one entry of a folder, and its bytes."""
    saved(disk_cache(model_of("full"), folder), model_of("full"), PROMPT[:-1])
    (path,) = entries_in(folder)
    return path, path.read_bytes()


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Replace the only entry by one with changed facts and a right checksum."""
    path, _ = stored(folder)
    facts = _metadata(path, IDENTITY)[0]
    change(facts)
    write(path, load_file(path), json.dumps(facts))


def finds(folder: Path) -> bool:
    """Whether a newly started process finds an entry in the folder."""
    return disk_cache(model_of("full"), folder).find(PROMPT) is not None


def test_any_flipped_bit_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, whole = stored(tmp_path)
    assert finds(tmp_path)
    dice = random.Random(3)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = {*range(24), *range(header - 8, header + 8), *range(len(whole) - 8, len(whole))}
    places |= {dice.randrange(len(whole)) for _ in range(150)}
    misses = 0
    for place in sorted(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        caplog.clear()
        assert not finds(tmp_path), place
        lines = [record for record in caplog.records if record.name.startswith(LOGGER)]
        assert len(lines) <= 1, place
        assert str(tmp_path) not in caplog.text
        misses += len(lines)
    assert misses > len(places) // 2, "a damaged token makes an entry for another prompt"


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
    assert path.read_bytes() == whole


def other_number(value: Any) -> Callable[[dict[str, Any]], object]:
    """Change the number of tokens in the first layer."""
    return lambda facts: facts["numbers"].__setitem__(0, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.update(identity="f" * 32),
        lambda facts: facts["numbers"].pop(),
        lambda facts: facts["numbers"].extend(facts["numbers"]),
        lambda facts: facts["numbers"].clear(),
        lambda facts: facts.update(numbers="100"),
        lambda facts: facts.update(numbers=100),
        lambda facts: facts.pop("numbers"),
        other_number(99),
        other_number(1 << 40),
        other_number(100.0),
        other_number(True),
        other_number(None),
        other_number("100"),
    ],
)
def test_a_valid_file_with_foreign_content_is_a_miss(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    rewritten(tmp_path, change)
    assert not finds(tmp_path)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((1, 2, 99, 8), np.uint32),
        np.zeros((1, 2, 100, 8), np.uint16),
        np.zeros((1, 2, 100, 8), np.float32),
        np.zeros((1, 2, 100, 16), np.uint32),
        np.zeros((1, 4, 100, 8), np.uint32),
        np.zeros((1, 2, 100, 8, 1), np.uint32),
        np.zeros((1600,), np.uint32),
        np.zeros((), np.uint32),
    ],
)
def test_arrays_that_are_not_those_of_the_facts_are_a_miss(
    array: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    path, _ = stored(tmp_path)
    tensors, facts = load_file(path), _metadata(path, IDENTITY)[1]
    write(path, tensors | {"0": array}, facts)
    assert not finds(tmp_path)
    write(path, tensors | {str(len(tensors) - 1): array}, facts)
    assert not finds(tmp_path), "one more array than a row has"
    tensors.pop("0")
    write(path, tensors, facts)
    assert not finds(tmp_path), "a missing array"


def test_rewriting_facts_without_a_change_is_a_hit(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda facts: facts)
    assert finds(tmp_path)


@pytest.mark.parametrize("kind", ["window", "hybrid", "recurrent", "quantised", "bfloat16"])
def test_rows_of_one_model_never_reach_another(kind: str, tmp_path: Path) -> None:
    """If two models had the same digest, their layouts would still differ."""
    model = model_of(kind)
    saved(disk_cache(model, tmp_path), model, PROMPT[:-1])
    assert disk_cache(model, tmp_path).find(PROMPT) is not None
    assert not finds(tmp_path)
    assert disk_cache(model, tmp_path, identity="f" * 32).find(PROMPT) is None


def test_a_requests_own_folder_serves_several_models(tmp_path: Path) -> None:
    model, own = model_of("full"), tmp_path / "own"
    saved(disk_cache(model, None, identity="f" * 32), model, PROMPT[:-1], own)
    disk = disk_cache(model, None)
    assert disk.find(PROMPT, path=own) is None
    saved(disk, model, PROMPT[:-1], own)
    assert disk.find(PROMPT, path=own) is not None
    assert len(entries_in(own)) == 2


@pytest.mark.parametrize("make", ["text", "link", "pipe", "nothing"])
def test_a_path_that_is_not_a_folder_is_not_touched(make: str, tmp_path: Path) -> None:
    own, precious = tmp_path / "own", tmp_path / "precious"
    precious.write_text("do not touch")
    match make:
        case "text":
            own.write_text("do not touch")
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
