"""Opens the standard streams that are closed when a process starts."""

from __future__ import annotations

import os


def open_closed_streams() -> None:
    """Open closed streams on /dev/null, because the next file or socket would get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
