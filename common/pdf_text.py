"""Extracts the text of PDF files, by pypdf in a child process (`pdf_process`)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import math
import subprocess
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from common.bounded_process import Ended, output_of

CPU_SECONDS = 10
WALL_SECONDS = 30
_MOST_KEPT = 32 << 20  # characters of the texts of recent files
_PROGRAM = "common.pdf_process"
_CUT = "[The rest of this document could not be shown.]"
_kept: OrderedDict[bytes, str] = OrderedDict()  # by digest, the least recently used first
_keeping = threading.Lock()
_readers = ThreadPoolExecutor(2, "pdf")  # so there are two child processes at most
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PdfText:
    """The text of a PDF.

    text: ends with a note if parts are missing; "" if there is no text.
    seconds: the wall time that the extraction took.
    """

    text: str
    seconds: float


_NOTHING = PdfText("", 0.0)


async def read(data: str, seconds: float) -> PdfText:
    """Extract the text of a PDF. If the caller is cancelled, the extraction ends.

    The text is "" if the PDF is encrypted or broken, consists of images, or is not a PDF. The texts
    of recent PDFs are stored.

    data: the PDF in base64, or as a data URI.
    seconds: limit of the processor time.
    """
    reading = _Reading()
    try:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_readers, _read, data, seconds, reading)
    finally:
        reading.end()


class _Reading:
    """The child process of one extraction, which another thread may end."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self.ended = False

    def begin(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        if self.ended:
            child.kill()

    def end(self) -> None:
        self.ended = True
        if self._child is not None:
            self._child.kill()  # does nothing if it has ended


def _read(data: str, seconds: float, reading: _Reading) -> PdfText:
    try:
        content = base64.b64decode("".join(data.rpartition(",")[2].split()), validate=True)
    except ValueError:
        return _NOTHING
    digest = hashlib.sha256(content).digest()
    with _keeping:
        if digest in _kept:
            _kept.move_to_end(digest)
            return PdfText(_kept[digest], 0.0)
    if seconds <= 0:
        return _NOTHING
    started = time.monotonic()
    text = _text_of(content, min(seconds, CPU_SECONDS), reading)
    if text is None or reading.ended:
        return _NOTHING
    if seconds >= CPU_SECONDS:  # a later request may get more of it otherwise
        with _keeping:
            _kept[digest] = text
            while sum(map(len, _kept.values())) > _MOST_KEPT:
                _kept.popitem(last=False)
    return PdfText(text, time.monotonic() - started)


def _text_of(content: bytes, cpu_seconds: float, reading: _Reading) -> str | None:
    """Return the text; None if the child process failed for another reason than the file."""
    task = {"cpu_seconds": max(math.ceil(cpu_seconds), 1)}
    try:
        ended = output_of(_PROGRAM, task, content, WALL_SECONDS, {}, reading.begin)
    except OSError:
        ended = Ended(1, b"")
    if ended.code == 1:
        _log.warning("the process for reading PDFs failed: is pypdf installed?")
        return None
    text = ended.output.decode("utf-8", "ignore").strip()
    return f"{text}\n\n{_CUT}" if text and ended.code != 0 else text
