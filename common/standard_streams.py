"""Opens standard streams that are closed when a process starts."""

from __future__ import annotations

import os


def open_closed_streams() -> None:
    """Open closed streams on /dev/null; otherwise a later file or socket gets their descriptor."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
