"""Lets a signal end the programs that a test starts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heeded(number: signal.Signals) -> Iterator[None]:
    """Start programs that this signal ends.

    A program inherits that a signal is ignored, and tests are started with ignored ones: a shell
    lets its background jobs ignore SIGINT, and nohup lets its program ignore SIGHUP.
    """
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)
