"""The environment that the processes below the gateway are started with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def backend_environ(environ: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The gateway's environment without what its own start script set for it, and `extra`."""
    found = dict(environ)
    if found.get("PYTHONPATH") == str(_ROOT):
        for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
            found.pop(name, None)
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        before = found.pop(f"MLX_BACKEND_{name}_BEFORE", None)
        if before:
            found[name] = before
        elif before is not None:
            found.pop(name, None)
    return found | dict(extra)
