"""The process's log on stderr: one line per event, `time=… level=… event=… key=value …`.

LocalAI shows the last line on stderr to users as the cause of a crash. So nothing else may write
there: library loggers, warnings, stray prints and uncaught exceptions all pass through here. The
caller decides what a line contains: never a prompt, a message, a tool body or a secret. The format
is in common/log_lines.py.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from types import TracebackType

from common.log_lines import LONGEST_VALUE, EventLog, traceback_of

_STDERR = 2
_events = EventLog("backend")
error, warning, info = _events.error, _events.warning, _events.info
debug, event, always = _events.debug, _events.event, _events.always
# Environment that libraries read at import: no progress bars or advice between our log lines.
_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GRPC_VERBOSITY": "NONE",
}


class _Stray(io.TextIOBase):
    """A standard stream that turns what other code prints into log lines."""

    def __init__(self) -> None:
        self._pending = threading.local()

    def write(self, text: str, /) -> int:
        *lines, rest = (getattr(self._pending, "text", "") + text).replace("\r", "\n").split("\n")
        self._pending.text = rest[:LONGEST_VALUE]
        for line in lines:
            if line.strip():
                info("output", text=line.strip())
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return _STDERR

    def isatty(self) -> bool:
        return False


def configure(level_name: str) -> None:
    """Route everything that this process writes to stderr through one formatter."""
    _events.configure(level_name)
    sys.stderr = _Stray()
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def take_stdout() -> None:
    """Log what other code prints on stdout: a host may have closed it, or read nothing from it."""
    sys.stdout = _Stray()


def flush() -> None:
    """Wait briefly for unwritten lines, because the process is about to end."""
    for handler in logging.root.handlers:
        handler.flush()


def _uncaught(
    _kind: type[BaseException], failure: BaseException, trace: TracebackType | None
) -> None:
    error("uncaught", traceback=traceback_of(failure.with_traceback(trace)))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else "?"
    if args.exc_value is not None:
        error("uncaught", thread=name, traceback=traceback_of(args.exc_value))
