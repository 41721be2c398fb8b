"""Groups of threads that exist from the start.

A thread pool of Python starts its threads when it gets work, and leaves the work in its queue for
ever if the system then allows no more threads.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from backend.engine.errors import refused_by_system


def reserved_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return a pool with all its threads. Raises Overloaded if the system does not allow them."""
    threads = ThreadPoolExecutor(count, thread_name_prefix=name)
    all_run = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            threads.submit(all_run.wait)
    except RuntimeError as fault:
        all_run.abort()
        threads.shutdown(wait=False, cancel_futures=True)
        raise (refused_by_system(fault) or fault) from None
    all_run.wait()
    return threads


def require_threads(count: int) -> None:
    """Raise Overloaded unless the system allows this process `count` more threads."""
    reserved_threads(count, "allowed").shutdown()
