"""One log line per finished call, with the fields that the servicer added.

Health and similar calls are logged at debug level only, because a host makes them all the time.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar

from backend.engine.events import Usage
from backend.rpc import logs
from backend.rpc.statuses import Status
from common.log_lines import traceback_of

Notes = dict[str, object]

_SPOKEN = frozenset({"Predict", "PredictStream", "LoadModel", "Free"})
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
    level = logging.INFO if method in _SPOKEN else logging.DEBUG
    _line(level, method, "OK", notes, started)


def cancelled(method: str, notes: Notes, started: float) -> None:
    _line(logging.INFO, method, "CANCELLED", notes, started)


def failed(method: str, notes: Notes, started: float, status: Status, error: Exception) -> None:
    """Log a failed call: a refusal with its reason, an internal error also with its origin."""
    reason: Notes = {"why": status.sentence}
    if not status.expected:
        reason = {"traceback": traceback_of(error)}
    level = logging.INFO if status.expected else logging.ERROR
    _line(level, method, status.code.name, {**notes, **reason}, started)


def _line(level: int, method: str, status: str, notes: Notes, started: float) -> None:
    ms = (time.monotonic() - started) * 1000
    logs.event(level, "call", {"rpc": method, "status": status, **notes, "ms": ms})
