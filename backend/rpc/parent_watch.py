"""Ends the process when the host that started it has ended.

A killed host cannot send SIGTERM, and an orphaned backend would keep its memory for nothing. The
watch has its own thread, so that neither a blocked event loop nor the engine delays it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping

from backend.rpc import logs

SWITCH = "LOCALAI_BACKEND_PARENT_WATCH"
INTERVAL = "LOCALAI_BACKEND_PARENT_WATCH_INTERVAL"
# The parent's process id, if the parent sets it. Otherwise the end of the parent goes unnoticed if
# it happens before this process has read the id.
PARENT = "MLX_BACKEND_PARENT"
_DEFAULT_SECONDS = 2.0
_UNITS = (("ms", 0.001), ("s", 1.0), ("m", 60.0))
_INIT = 1  # the process that becomes the parent of orphans


def interval_of(text: str) -> float:
    """Return the seconds between two checks; the default if the text is no positive duration."""
    text = text.strip().lower()
    scale = 1.0
    for unit, seconds in _UNITS:
        if text.endswith(unit):
            text, scale = text.removesuffix(unit), seconds
            break
    try:
        seconds = float(text) * scale
    except ValueError:
        return _DEFAULT_SECONDS
    return seconds if 0 < seconds < threading.TIMEOUT_MAX else _DEFAULT_SECONDS


def should_watch(environ: Mapping[str, str], parent: int) -> bool:
    """Return whether there is a parent to watch and the watch is not turned off."""
    if environ.get(SWITCH, "").strip().lower() in ("false", "0", "no", "off"):
        return False
    return sys.platform != "win32" and parent > _INIT


def arm(environ: Mapping[str, str]) -> bool:
    """Start watching. Returns False if there is nothing to watch."""
    parent = int(environ.get(PARENT, "0")) or os.getppid()
    if not should_watch(environ, parent):
        return False
    seconds = interval_of(environ.get(INTERVAL, ""))
    watch = threading.Thread(
        target=_watch, args=(parent, seconds), name="parent-watch", daemon=True
    )
    watch.start()
    return True


def _watch(parent: int, seconds: float) -> None:
    while (now := os.getppid()) == parent and now != _INIT:
        time.sleep(seconds)
    logs.error("exit", cause=f"the host process {parent} is gone")
    logs.flush()
    os._exit(1)
