"""Formats the log lines of every process in this project.

Each event is one line: `time=… level=… event=… key=value …`. The caller decides what a line
contains, which must never be a prompt, a message or a secret. This module only formats the line,
and escapes values so that none can start a new line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import select
import threading
import time
import traceback
import warnings
from datetime import UTC, datetime

LEVELS = {
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
LONGEST_VALUE = 8000
_STDERR = 2
_LONGEST_EXCEPTION = 200
_MOST_LINES = 1000
_FLUSH_SECONDS = 1.0
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127, 0x85)}
_CONTROLS |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
_CONTROLS |= {0x2028: "\\u2028", 0x2029: "\\u2029"}


def rendered(value: object) -> str:
    """Return a value as one word or in quotes, with newlines escaped."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    if len(text) > LONGEST_VALUE:
        text = text[:LONGEST_VALUE] + "…"
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').translate(_CONTROLS) + '"'


def stamp(seconds: float | None = None) -> str:
    """Return the beginning of a line: a time in UTC with milliseconds.

    seconds: since the epoch; None for the current time.
    """
    at = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return f"time={at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03}Z"


def traceback_of(failure: BaseException) -> str:
    """Return an exception's traceback, with a shortened message, which may quote a request."""
    frames = "".join(traceback.format_tb(failure.__traceback__))
    words = str(failure)[:_LONGEST_EXCEPTION]
    return f"{frames}{type(failure).__name__}: {words}"


class LineFormatter(logging.Formatter):
    """Formats records with a `fields` attribute as events, and other records as `event=log`.

    A record with a `line` attribute contains a line of another process, in the same format.
    """

    def format(self, record: logging.LogRecord) -> str:
        if line := getattr(record, "line", ""):
            return str(line)
        fields = getattr(record, "fields", None)
        if fields is None:
            event, fields = "log", {"logger": record.name, "message": record.getMessage()}
        else:
            event = record.msg
        if record.exc_info and record.exc_info[1] is not None:
            fields = {**fields, "traceback": traceback_of(record.exc_info[1])}
        level = record.levelname.lower()
        words = " ".join(f"{key}={rendered(value)}" for key, value in fields.items())
        return f"{stamp(record.created)} level={level} event={event} {words}".rstrip()


class LineWriter(logging.Handler):
    """Writes lines to a descriptor on a separate thread, so that slow readers block no callers.

    If more than `_MOST_LINES` lines wait, new lines are dropped, and a later line says how many.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.setFormatter(LineFormatter())
        self._descriptor = descriptor
        self._dropped = 0
        # The garbage collector may log anywhere, so adding to the queue must not take a lock.
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() < _MOST_LINES:
            self._lines.put(self.format(record))
        else:
            self._dropped += 1

    def flush(self) -> None:
        """Wait until all lines are written, but only for a short time."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(_FLUSH_SECONDS)

    def _write(self) -> None:
        torn = b""  # ends a line that was written in part
        while True:
            text = self._lines.get()
            if isinstance(text, threading.Event):
                text.set()
                continue
            dropped = 0
            if self._dropped and self._lines.qsize() <= 1:  # perhaps the event of `flush`
                self.acquire()
                dropped, self._dropped = self._dropped, 0
                self.release()
                text += f"\n{stamp()} level=warning event=log_dropped lines={dropped}"
            left = line = torn + f"{text}\n".encode(errors="replace")
            try:
                while left:
                    left = left[self._write_some(left) :]
                torn = b""
            except OSError:  # the reader has closed the pipe, or the disk is full
                torn = b"\n" if len(left) < len(line) else torn
                self.acquire()
                self._dropped += 1 + dropped
                self.release()

    def _write_some(self, left: bytes) -> int:
        with contextlib.suppress(BlockingIOError):
            return os.write(self._descriptor, left)
        # Another process that shares the pipe or terminal has made it non-blocking.
        room = select.poll()
        room.register(self._descriptor, select.POLLOUT)
        room.poll()
        return 0


class EventLog:
    """A program's logger, one line per event: `log.info("started", port=9000)`."""

    def __init__(self, logger: str) -> None:
        self.logger = logging.getLogger(logger)

    def configure(self, level_name: str) -> None:
        """Write everything that this process logs to stderr.

        level_name: the lowest level to write, a key of LEVELS.
        """
        given = level_name.strip().lower()
        level = LEVELS.get(given, logging.INFO)
        logging.raiseExceptions = False
        logging.root.handlers[:] = [LineWriter(_STDERR)]
        logging.root.setLevel(max(level, logging.WARNING))
        self.logger.setLevel(level)
        logging.captureWarnings(True)
        warnings.simplefilter("default" if level == logging.DEBUG else "ignore")
        if given and given not in LEVELS:
            self.warning("log_level", value=level_name, allowed=",".join(LEVELS))

    def error(self, name: str, /, **fields: object) -> None:
        """Log a failure that should not happen."""
        self.event(logging.ERROR, name, fields)

    def warning(self, name: str, /, **fields: object) -> None:
        """Log something that a person may want to change."""
        self.event(logging.WARNING, name, fields)

    def info(self, name: str, /, **fields: object) -> None:
        """Log an event."""
        self.event(logging.INFO, name, fields)

    def debug(self, name: str, /, **fields: object) -> None:
        """Log an event that is frequent and routine."""
        self.event(logging.DEBUG, name, fields)

    def event(self, level: int, name: str, fields: dict[str, object]) -> None:
        """Log one line at any level of `logging`."""
        self.logger.log(level, name, extra={"fields": fields})

    def always(self, name: str, /, **fields: object) -> None:
        """Log an event that another program waits for, at every log level."""
        place = ("", 0, name, (), None)
        record = self.logger.makeRecord(self.logger.name, logging.INFO, *place)
        record.fields = fields
        self.logger.handle(record)
