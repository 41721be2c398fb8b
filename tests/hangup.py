"""Lets programs that a test starts be ended by SIGHUP, also where nohup started the tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_programs() -> Iterator[None]:
    """Programs inherit that SIGHUP is ignored, so it is not ignored while they start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
