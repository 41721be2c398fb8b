"""The time-out of ranks that the loaded model has, stored for the supervisor.

The supervisor kills a rank that a signal has stopped for longer than that.
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
        with contextlib.suppress(OSError):  # the supervisor then takes the default
            own = Path(f"{path}.{os.getpid()}")
            own.write_text(f"{seconds:g}")
            own.replace(path)


def stored(path: Path) -> float:
    """Return the time-out that a rank has stored last, in seconds; the default if none has."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return TIMEOUT
