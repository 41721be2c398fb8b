"""Logs as the host shows them: one line an event, on stderr, `level=… event=… key=value …`.

The host keeps the last stderr line as the cause of a crash and shows it to users (contract 1.2),
so nothing may write lines of its own: loggers of libraries, warnings, stray prints and uncaught
exceptions all pass through here. What a line may hold is decided where it is written: never a
prompt, a message, a tool body or a secret.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from types import TracebackType
from typing import TextIO

LEVELS = {
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")
_LONGEST_VALUE = 8000
_LONGEST_EXCEPTION = 200
_log = logging.getLogger("backend")


def error(name: str, /, **fields: object) -> None:
    event(logging.ERROR, name, fields)


def warning(name: str, /, **fields: object) -> None:
    event(logging.WARNING, name, fields)


def info(name: str, /, **fields: object) -> None:
    event(logging.INFO, name, fields)


def debug(name: str, /, **fields: object) -> None:
    event(logging.DEBUG, name, fields)


def event(level: int, name: str, fields: dict[str, object]) -> None:
    _log.log(level, name, extra={"fields": fields})


def rendered(value: object) -> str:
    """A value in one word or in quotes, newlines escaped."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    if len(text) > _LONGEST_VALUE:
        text = text[:_LONGEST_VALUE] + "…"
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').translate(_CONTROLS) + '"'


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127, 0x85)}
_CONTROLS |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
_CONTROLS |= {0x2028: "\\u2028", 0x2029: "\\u2029"}


def traceback_of(failure: BaseException) -> str:
    """Where an exception came from. Its own words are cut short: they may quote a request."""
    frames = "".join(traceback.format_tb(failure.__traceback__))
    words = str(failure)[:_LONGEST_EXCEPTION]
    return f"{frames}{type(failure).__name__}: {words}"


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        if fields is None:
            event, fields = "log", {"logger": record.name, "message": record.getMessage()}
        else:
            event = record.msg
        if record.exc_info and record.exc_info[1] is not None:
            fields = {**fields, "traceback": traceback_of(record.exc_info[1])}
        level = record.levelname.lower()
        words = " ".join(f"{key}={rendered(value)}" for key, value in fields.items())
        return f"level={level} event={event} {words}".rstrip()


class _Stray(io.TextIOBase):
    """Stands in for `sys.stderr`: turns whatever others print into log lines."""

    def __init__(self, target: TextIO) -> None:
        self._target = target
        self._pending = threading.local()

    def write(self, text: str, /) -> int:
        *lines, rest = (getattr(self._pending, "text", "") + text).replace("\r", "\n").split("\n")
        self._pending.text = rest[:_LONGEST_VALUE]
        for line in lines:
            if line.strip():
                info("output", text=line.strip())
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._target.fileno()

    def isatty(self) -> bool:
        return False


def configure(level_name: str) -> None:
    """Route everything that this process says to stderr through one formatter."""
    stderr: TextIO = sys.__stderr__ or io.StringIO()
    handler = logging.StreamHandler(stderr)
    handler.setFormatter(_Line())
    logging.raiseExceptions = False
    logging.root.handlers[:] = [handler]
    level = LEVELS.get(level_name.strip().lower())
    _log.setLevel(logging.INFO if level is None else level)
    logging.root.setLevel(logging.WARNING if level is None else max(level, logging.WARNING))
    logging.captureWarnings(True)
    warnings.simplefilter("default" if level == logging.DEBUG else "ignore")
    sys.stderr = _Stray(stderr)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if level is None and level_name:
        warning("log_level", value=level_name, allowed=",".join(LEVELS))


# What libraries read when they are imported: no progress bars and no advice between our lines.
_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GRPC_VERBOSITY": "NONE",
}


def _uncaught(
    _kind: type[BaseException], failure: BaseException, trace: TracebackType | None
) -> None:
    error("uncaught", traceback=traceback_of(failure.with_traceback(trace)))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else "?"
    if args.exc_value is not None:
        error("uncaught", thread=name, traceback=traceback_of(args.exc_value))
