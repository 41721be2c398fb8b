"""Finds the folder for files that this project can make or download again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from common import launch


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder that MLX_BACKEND_CACHE names, or mlx-backend in the user's cache folder.

    Returns None if the user has no home folder.
    """
    found = launch.cache_folder(environ)
    return Path(found) if found else None
