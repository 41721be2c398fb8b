"""Draws a progress bar for a download, as text."""

from __future__ import annotations

_WIDTH = 24  # characters


def bar(done: int, total: int) -> str:
    """Return a progress bar with its numbers.

    done: MiB that were downloaded.
    total: MiB of the whole download.
    """
    filled = _WIDTH * done // total
    return f"[{'#' * filled:-<{_WIDTH}}] {done} of {total} MiB"
