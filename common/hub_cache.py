"""Finds the folder in which huggingface_hub caches repositories."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


class NoHome(Exception):
    """The cache folder is unknown; `str()` says why, and what to do."""


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder according to the environment. Raises NoHome.

    LocalAI sets both HF_HOME and HUGGINGFACE_HUB_CACHE to its models folder. The second variable
    takes precedence, and no subfolder `hub` is appended to it.
    """
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    given = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    try:
        return Path(os.path.expandvars(given or f"{home}/hub")).expanduser()
    except RuntimeError:  # the system does not know the user, as in some containers
        raise NoHome("there is no home folder for downloads: set HF_HOME to a folder") from None
