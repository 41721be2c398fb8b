"""The log of the gateway and its backends on stderr: `time=… level=… event=… key=value …`.

A backend's line is passed on with `backend=` in it, at the level that the backend gave it.

Lines never contain a body, a prompt, an answer or a key: only what was requested, and how that
ended.
"""

from __future__ import annotations

import re

from common.log_lines import LEVELS, EventLog, rendered

_OF_BACKEND = re.compile(r"(time=\S+ level=(\w+)) (event=[ -~].*)")
_events = EventLog("gateway")
configure = _events.configure
error, warning, info = _events.error, _events.warning, _events.info
debug, event = _events.debug, _events.event


def pass_on(backend: str, line: str) -> None:
    """Log a line of a backend. One in another format becomes the text of an event."""
    found = _OF_BACKEND.fullmatch(line) if line.isprintable() else None
    if found is None or found[2] not in LEVELS:
        info("output", backend=backend, text=line)
        return
    whole = f"{found[1]} backend={rendered(backend)} {found[3]}"
    _events.logger.log(LEVELS[found[2]], "", extra={"line": whole})
