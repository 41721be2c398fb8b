"""Writes one log line per finished call, with the fields that the servicer added.

While the queue is full, most refused calls are only counted, because writing a line for each would
take time from the calls that are served. Health and similar calls are logged at debug level only,
because a host makes them all the time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextvars import ContextVar

from backend.engine.errors import Overloaded
from backend.engine.events import Usage
from backend.rpc import logs
from backend.rpc.statuses import Status
from common.log_lines import traceback_of

Notes = dict[str, object]

_LOGGED_AT_INFO = frozenset({
    "Predict", "PredictStream", "LoadModel", "Free",
    "AudioTranscription", "AudioTranscriptionStream",
})  # fmt: skip
_REFUSALS_SECONDS = 1.0  # the period for which refusals are counted in one line
_notes: ContextVar[Notes] = ContextVar("notes")


def begin() -> Notes:
    """Start collecting log fields for the call that this task serves."""
    notes: Notes = {}
    _notes.set(notes)
    return notes


def note(**fields: object) -> None:
    """Add fields to the log line of the current call."""
    _notes.get({}).update(fields)


def note_usage(usage: Usage) -> None:
    note(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )


def succeeded(method: str, notes: Notes, started: float) -> None:
    level = logging.INFO if method in _LOGGED_AT_INFO else logging.DEBUG
    _line(level, method, "OK", notes, started)


def cancelled(method: str, notes: Notes, started: float) -> None:
    _line(logging.INFO, method, "CANCELLED", notes, started)


def failed(method: str, notes: Notes, started: float, status: Status, error: Exception) -> None:
    """Log a failed call: a refusal with its reason, an internal error also with its origin.

    While the queue is full, refusals after the first are only counted.
    """
    if isinstance(error, Overloaded) and _refusals.counted():
        return
    reason: Notes = {"why": status.message}
    if not status.expected:
        reason = {"traceback": traceback_of(error)}
    level = logging.INFO if status.expected else logging.ERROR
    _line(level, method, status.code.name, {**notes, **reason}, started)


def _line(level: int, method: str, status: str, notes: Notes, started: float) -> None:
    ms = (time.monotonic() - started) * 1000
    logs.event(level, "call", {"rpc": method, "status": status, **notes, "ms": ms})


class _Refusals:
    """A count of the requests that a full queue refuses.

    The first one in a second is logged like any call; one line after that second counts the others.
    """

    def __init__(self) -> None:
        self._more: int | None = None

    def counted(self) -> bool:
        """Count a refusal. Returns False for the first of a period, which gets a log line."""
        if self._more is None:
            self._more = 0
            asyncio.get_running_loop().call_later(_REFUSALS_SECONDS, self._log_count)
            return False
        self._more += 1
        return True

    def _log_count(self) -> None:
        more, self._more = self._more, None
        if more:
            logs.info("overloaded", more_refused=more)


_refusals = _Refusals()
