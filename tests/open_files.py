"""Open files in the tests' own process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def more_than_select_takes() -> Iterator[None]:
    """Hold so many files open that the next descriptors are above select's limit of 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield
