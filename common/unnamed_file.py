"""Creates files without names, for what is passed to child processes."""

from __future__ import annotations

import os
import sys
import tempfile


def unnamed_file(purpose: str) -> int:
    """Return the descriptor of an empty file, which the caller closes. Raises OSError.

    On Linux the file is in memory, because folders for temporary files may be full or read-only.
    """
    if sys.platform == "linux":
        file = os.memfd_create(purpose)
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    return file
