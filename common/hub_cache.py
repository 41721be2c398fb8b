"""Where the hub's client keeps repositories."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the cache, by the environment as the host sets it.

    A host points both HF_HOME and HUGGINGFACE_HUB_CACHE at its models folder (contract 1.1.6);
    the second one counts, and has no `hub` folder of its own.
    """
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    given = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(given or f"{home}/hub")).expanduser()
