"""Lets a signal end the programs that a test starts, even if the tests themselves ignore it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unignored(number: signal.Signals) -> Iterator[None]:
    """Programs that are started inside the block do not ignore this signal.

    A program inherits ignored signals, and the tests may ignore some: a shell makes its background
    jobs ignore SIGINT, and nohup makes its program ignore SIGHUP.
    """
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)
