"""Draws how far a download is, for a line on the terminal."""

from __future__ import annotations

_WIDTH = 24  # characters


def bar(done: int, total: int) -> str:
    """Return a bar with its numbers.

    done, total: in MiB.
    """
    filled = _WIDTH * done // total
    return f"[{'#' * filled:-<{_WIDTH}}] {done} of {total} MiB"
