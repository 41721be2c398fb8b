"""The folder for files that this project can make or download again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from common import launch


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return MLX_BACKEND_CACHE, or mlx-backend in the user's cache folder.

    None for a user without a home folder.
    """
    found = launch.cache_folder(environ)
    return Path(found) if found else None
