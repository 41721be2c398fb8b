"""Expert weights are read from files as they were at the load, or not at all."""

from __future__ import annotations

import errno
import gc
import json
import os
import struct
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.engine_state import ExpertCounts
from backend.engine.errors import ExpertsUnreadable
from backend.engine.experts.weight_files import Span, WeightFiles

_BIG = 5 << 30  # bytes of the tensor before the one that is read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file as the hub stores it: a link to a blob, with data at an odd position beyond 4 GiB."""
    header = {
        "__metadata__": {"format": "mlx"},
        "layers.0.big": {"dtype": "U8", "shape": [_BIG], "data_offsets": [0, _BIG]},
        "layers.1.up": {"dtype": "F32", "shape": [4, 6], "data_offsets": [_BIG, _BIG + 96]},
    }
    text = json.dumps(header)
    text += " " * (1 - len(text) % 2)
    with (tmp_path / "blob").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text.encode())
        file.seek(_BIG, os.SEEK_CUR)
        file.write(np.arange(24, dtype=np.float32).tobytes())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to("../blob")
    return tmp_path / "model"


def _opened(folder: Path) -> tuple[WeightFiles, list[Span]]:
    files = WeightFiles(folder, ExpertCounts(1, 4, 1))
    span = files.tensors["layers.1.up"].span
    return files, [Span(span.file, span.start + 24 * expert, 24) for expert in range(4)]


def test_experts_are_read_however_little_a_read_returns(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, rows, at: read(file, [rows[0][:5]], at))
    files, spans = _opened(folder)
    (raw,) = files.finish([files.begin([spans])])
    assert raw.view(mx.float32).flatten().tolist() == list(range(24))
    assert files._counts.read_bytes == 96


def test_files_are_closed_once_the_reads_that_have_begun_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a pass fails between two reads, and the model is freed.

    Freeing waits for no thread: garbage collection can run while `threading` holds a lock that a
    thread needs to end.
    """
    go, began, read = threading.Event(), threading.Event(), os.preadv

    def wait(*call: Any) -> int:
        began.set()
        go.wait()
        return read(*call)

    files, spans = _opened(folder)
    descriptor, threads = files._files[0].descriptor, set(files._threads._threads)
    monkeypatch.setattr(os, "preadv", wait)
    files.begin([spans])
    assert began.wait(60)
    owner = threading.Thread(target=_drop, args=([files],))
    del files
    owner.start()
    owner.join(60)
    waits = owner.is_alive()
    os.fstat(descriptor)
    go.set()
    assert not waits
    for thread in threads:
        thread.join()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def _drop(held: list[WeightFiles]) -> None:
    held.clear()
    gc.collect()


def test_a_file_whose_state_is_unknown_is_unreadable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, spans = _opened(folder)
    reading = files.begin([spans])

    def stale(_: int) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fstat", stale)
        with pytest.raises(ExpertsUnreadable) as unreadable:
            files.finish([reading])
    assert "model.safetensors cannot be read (Stale file handle)" in str(unreadable.value)
