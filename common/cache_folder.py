"""The folder for files that this project can make or download again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """MLX_BACKEND_CACHE, or mlx-backend in the user's cache folder; None without a home folder."""
    shared = environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = Path(environ.get("MLX_BACKEND_CACHE") or f"{shared}/mlx-backend")
    try:
        return named.expanduser().absolute()
    except RuntimeError:
        return None
