"""The gateway's own lines on stderr: `level=… event=… key=value …`, as its backends write them.

Never a body, a prompt, an answer or a key: a line says who asked for what, and how it ended.
"""

from __future__ import annotations

import logging
import sys
import warnings

from common.log_lines import LEVELS, LineFormatter

_log = logging.getLogger("gateway")


def error(name: str, /, **fields: object) -> None:
    """Something broke that should not."""
    event(logging.ERROR, name, fields)


def warning(name: str, /, **fields: object) -> None:
    """Something that a person may want to change."""
    event(logging.WARNING, name, fields)


def info(name: str, /, **fields: object) -> None:
    """What happened."""
    event(logging.INFO, name, fields)


def debug(name: str, /, **fields: object) -> None:
    """What happens all the time."""
    event(logging.DEBUG, name, fields)


def event(level: int, name: str, fields: dict[str, object]) -> None:
    """One line of any level (a number of `logging`)."""
    _log.log(level, name, extra={"fields": fields})


def configure(level_name: str) -> None:
    """Route all that this process logs to stderr, from this level (a key of LEVELS) on."""
    level = LEVELS.get(level_name.strip().lower(), logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.raiseExceptions = False
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(max(level, logging.WARNING))
    _log.setLevel(level)
    logging.captureWarnings(True)
    warnings.simplefilter("default" if level == logging.DEBUG else "ignore")
    if level_name.strip() and level_name.strip().lower() not in LEVELS:
        warning("log_level", value=level_name, allowed=",".join(LEVELS))
