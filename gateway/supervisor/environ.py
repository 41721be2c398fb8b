"""The environment that the processes below the gateway are started with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SETTINGS = "MLX_GATEWAY_"
_ROOT = Path(__file__).parents[2]


def backend_environ(environ: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The gateway's environment without what is the gateway's alone, and `extra`.

    That is what its start script set for it, and its settings: keys among them, which code of a
    model's checkpoint must not read.
    """
    found = {name: value for name, value in environ.items() if not name.startswith(SETTINGS)}
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
