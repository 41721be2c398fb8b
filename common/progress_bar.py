"""Finds how much has been downloaded in the log of a backend, and draws a bar of it as text."""

from __future__ import annotations

import re

# The lines that a backend logs about a download, every two seconds and at its end
# (backend/engine/loading/hub_process).
DOWNLOAD = re.compile(r"downloading model .*, (\d+) of (\d+) MiB")
DOWNLOADED = "downloaded model "

_WIDTH = 24  # characters


def bar(done: int, total: int) -> str:
    """Return a progress bar with its numbers.

    done: MiB that were downloaded.
    total: MiB of the whole download.
    """
    filled = _WIDTH * done // total
    return f"[{'#' * filled:-<{_WIDTH}}] {done} of {total} MiB"
