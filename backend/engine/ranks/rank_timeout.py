"""Stores the time-out of ranks, which the loaded model sets, for the supervisor.

The supervisor kills a rank that a signal has stopped for longer than the time-out.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from backend.engine.ranks.place import TIMEOUT

FILE = "MLX_BACKEND_RANK_TIMEOUT"


def store(seconds: float) -> None:
    """Store the time-out for the supervisor, if this process has one."""
    if path := os.environ.get(FILE):
        with contextlib.suppress(OSError):  # the supervisor then uses the default
            own = Path(f"{path}.{os.getpid()}")
            own.write_text(f"{seconds:g}")
            own.replace(path)


def stored(path: Path) -> float:
    """Return the latest stored time-out in seconds; the default if no rank has stored one."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return TIMEOUT
