"""The environment of processes that this project's programs start."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

SETTINGS = "MLX_GATEWAY_"  # begins the names of the gateway's settings
_ROOT = Path(__file__).parents[1]


def backend_environ(environ: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of this project's programs, and with `extra`.

    These are the changes of the start script, and the gateway's settings, which include keys that
    code in a checkpoint must not read.
    """
    found = {name: value for name, value in environ.items() if not name.startswith(SETTINGS)}
    if found.get("PYTHONPATH") == str(_ROOT):
        for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
            found.pop(name, None)
    restore_libraries(found)
    return found | dict(extra)


def restore_libraries(environ: MutableMapping[str, str]) -> None:
    """Undo what the start script changed to preload OpenBLAS in its own process only."""
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        before = environ.pop(f"MLX_BACKEND_{name}_BEFORE", None)
        if before:
            environ[name] = before
        elif before is not None:
            environ.pop(name, None)
