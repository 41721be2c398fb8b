"""The program that tries grammars, where the system allows no more processes."""

from __future__ import annotations

import errno
import os

from backend.engine.constraints.trial_process import main


def _refused() -> int:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


if __name__ == "__main__":
    os.fork = _refused
    main()
