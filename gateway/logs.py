"""The log of the gateway and its backends on stderr: `time=… level=… event=… key=value …`.

A backend's line is passed on with `backend=` in it, at the level that the backend gave it.

They never contain a body, a prompt, an answer or a key: only what was requested, and how it ended.
"""

from __future__ import annotations

import logging
import re
import warnings

from common.log_lines import LEVELS, EventLog, LineWriter, rendered

_STDERR = 2
_OF_BACKEND = re.compile(r"(time=\S+ level=(\w+)) (event=[ -~].*)")
_events = EventLog("gateway")
error, warning, info = _events.error, _events.warning, _events.info
debug, event = _events.debug, _events.event


def configure(level_name: str) -> None:
    """Route all that this process logs to stderr, from this level (a key of LEVELS) on."""
    level = LEVELS.get(level_name.strip().lower(), logging.INFO)
    logging.raiseExceptions = False
    logging.root.handlers[:] = [LineWriter(_STDERR)]
    logging.root.setLevel(max(level, logging.WARNING))
    _events.logger.setLevel(level)
    logging.captureWarnings(True)
    warnings.simplefilter("default" if level == logging.DEBUG else "ignore")
    if level_name.strip() and level_name.strip().lower() not in LEVELS:
        warning("log_level", value=level_name, allowed=",".join(LEVELS))


def pass_on(backend: str, line: str) -> None:
    """Log a line of a backend. One in another format becomes the text of an event."""
    found = _OF_BACKEND.fullmatch(line) if line.isprintable() else None
    if found is None or found[2] not in LEVELS:
        info("output", backend=backend, text=line)
        return
    whole = f"{found[1]} backend={rendered(backend)} {found[3]}"
    _events.logger.log(LEVELS[found[2]], "", extra={"line": whole})
