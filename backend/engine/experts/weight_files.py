"""Reads parts of a checkpoint's weight files on several threads.

The files stay open, so a file that is deleted or replaced by another can still be read. A file that
is overwritten is noticed after each read, before anything is computed with its content.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from backend.engine.engine_state import ExpertCounts
from backend.engine.errors import ExpertsUnreadable
from backend.engine.loading.shards import read_header, weight_files
from backend.engine.threads import reserved_threads

_THREADS = 8  # an SSD needs several reads at a time if each has some hundred KiB
_TYPES = {
    "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "F8_E4M3": mx.uint8,
    "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "U32": mx.uint32,
    "I32": mx.int32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """A range of bytes in a file."""

    file: int  # the number of the file
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file."""

    span: Span
    dtype: mx.Dtype
    shape: tuple[int, ...]


class _File:
    """An open file, closed with the last reference to this object; a read has such a reference.

    state: the result of `_state` when the file was opened.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        self.state = _state(self.descriptor)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Garbage collection can run anywhere, even while a thread has a lock of `threading`, so
        # nothing here may wait for a thread or a lock. It can also run after `os` was emptied.
        if hasattr(self, "descriptor"):
            close(self.descriptor)


@dataclass(frozen=True, slots=True)
class Reading:
    """Reads that have begun."""

    buffers: Sequence[np.ndarray]  # the bytes of each source, one row per span
    parts: Mapping[Future[None], int]  # number of bytes that each task reads
    files: Set[int]  # the numbers of the files that are read


class WeightFiles:
    """The weight files of a model, open until this object is released and its reads have ended.

    counts: counts the bytes that are read and the seconds for which the engine waits.
    """

    def __init__(self, folder: Path, counts: ExpertCounts) -> None:
        """Open the files. Raises OSError, Incomplete, and Overloaded if there are no threads."""
        self._counts = counts
        self._files: list[_File] = []
        self._threads = reserved_threads(_THREADS, "experts")
        self._abandoned: dict[Future[None], int] = {}
        self.tensors: dict[str, Tensor] = {}
        for name in weight_files(path.name for path in folder.iterdir()):
            self._files.append(file := _File(folder, name))
            self._read_header(name, file.descriptor)

    def _read_header(self, name: str, descriptor: int) -> None:
        with open(descriptor, "rb", closefd=False) as file:
            header, _ = read_header(name, file, os.fstat(descriptor).st_size)
            data = file.tell()
        for tensor, entry in header.items():
            if (dtype := _TYPES.get(entry["dtype"])) is not None:
                start, end = entry["data_offsets"]
                span = Span(len(self._files) - 1, data + start, end - start)
                self.tensors[tensor] = Tensor(span, dtype, tuple(entry["shape"]))

    def begin(self, sources: Sequence[Sequence[Span]]) -> Reading:
        """Begin to read the spans of each source, which have equal sizes."""
        buffers = [np.empty((len(spans), spans[0].size), np.uint8) for spans in sources]
        rows = [
            (self._files[span.file], span, row.data)
            for spans, buffer in zip(sources, buffers, strict=True)
            for span, row in zip(spans, buffer, strict=True)
        ]
        shares = [rows[at::_THREADS] for at in range(min(_THREADS, len(rows)))]
        parts = {
            self._threads.submit(_read, share): sum(span.size for _, span, _ in share)
            for share in shares
        }
        self._counts.read_bytes += sum(buffer.nbytes for buffer in buffers)
        return Reading(buffers, parts, {span.file for _, span, _ in rows})

    def finish(self, readings: Sequence[Reading]) -> list[mx.array]:
        """Wait for reads of the same sources, and return the bytes of each source, [spans, bytes].

        Raises ExpertsUnreadable.
        """
        began = time.perf_counter()
        parts = [part for reading in readings for part in reading.parts]
        wait(parts)
        self._counts.wait_seconds += time.perf_counter() - began
        for part in parts:
            part.result()
        for number in {number for reading in readings for number in reading.files}:
            file = self._files[number]
            with _readable(file):
                if _state(file.descriptor) != file.state:
                    raise _changed(file)
        sources = zip(*(reading.buffers for reading in readings), strict=True)
        return [mx.array(rows[0] if len(rows) == 1 else np.concatenate(rows)) for rows in sources]

    def abandon(self, reading: Reading) -> None:
        """Stop reads that have not begun, and count the others as unnecessary reads."""
        running = {part: size for part, size in reading.parts.items() if not part.cancel()}
        self._counts.read_bytes -= sum(reading.parts.values()) - sum(running.values())
        self._counts.wasted_bytes += sum(running.values())
        self._abandoned |= running

    @property
    def abandoned_bytes(self) -> int:
        """The size of the buffers to which abandoned reads still write."""
        self._abandoned = {part: size for part, size in self._abandoned.items() if not part.done()}
        return sum(self._abandoned.values())


def _read(rows: Sequence[tuple[_File, Span, memoryview]]) -> None:
    for file, span, row in rows:
        done = 0
        while done < span.size:
            with _readable(file):
                count = os.preadv(file.descriptor, [row[done:]], span.start + done)
            if not count:
                raise _changed(file)
            done += count


@contextmanager
def _readable(file: _File) -> Iterator[None]:
    """Convert OSError in the context to ExpertsUnreadable."""
    try:
        yield
    except OSError as fault:
        raise ExpertsUnreadable(
            f"the weight file {file.name} cannot be read ({fault.strerror}): check the disk, and"
            " load the model again"
        ) from None


def _changed(file: _File) -> ExpertsUnreadable:
    return ExpertsUnreadable(
        f"the weight file {file.name}, which contains experts, has changed since the model was"
        " loaded: load the model again"
    )


def _state(descriptor: int) -> tuple[int, int]:
    """Return the size of a file and its modification time, which change when it is written to."""
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns
