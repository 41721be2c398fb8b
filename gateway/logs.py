"""The gateway's own lines on stderr: `level=… event=… key=value …`, as its backends write them.

They never contain a body, a prompt, an answer or a key: only what was requested, and how it ended.
"""

from __future__ import annotations

import logging
import warnings

from common.log_lines import LEVELS, EventLog, LineWriter

_STDERR = 2
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
