"""Creates files without names, which pass data to child processes."""

from __future__ import annotations

import os
import sys
import tempfile


def unnamed_file(purpose: str) -> int:
    """Return the descriptor of an empty file, which the caller must close. Raises OSError.

    On Linux the file is in memory, because the folder for temporary files may be full or read-only.

    purpose: a name for diagnostic tools.
    """
    if sys.platform == "linux":
        file = os.memfd_create(purpose)
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    return file
