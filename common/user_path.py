"""Reads a path that a user has typed."""

from __future__ import annotations

from pathlib import Path


def user_path(text: str) -> Path:
    """Return the path, with the home folder for `~`; unchanged if there is no such user."""
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:
        return path
