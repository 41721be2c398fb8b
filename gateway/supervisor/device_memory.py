"""How much memory all loaded models may take where nobody says: the device's, less a reserve.

Each backend bounds itself by the same reading, but knows nothing of the others.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from common.machine_memory import machine_memory, reserve

_LOOK = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_LOOK_LIMIT = 10.0  # seconds
_BUILDS = ("mlx-cuda-12", "mlx-cuda-13")  # of MLX that compute on NVIDIA's devices


def device_memory(root: Path = Path("/")) -> int:
    """Bytes: of the first graphics card, of what macOS lets Metal use, or of the RAM that the
    machine and its control groups leave this process.
    """
    if sys.platform == "darwin":
        return machine_memory(root) * 2 // 3
    card = _card() if any(map(_is_installed, _BUILDS)) else 0
    if card:
        return card - min(1 << 30, card // 4)
    memory = machine_memory(root)
    return memory - reserve(memory)


def _is_installed(package: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(package))
    return False


def _card() -> int:
    """Memory of the first card; 0 where the driver does not say."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        told = subprocess.run(_LOOK, capture_output=True, check=True, timeout=_LOOK_LIMIT)
        return int(told.stdout.split()[0]) << 20
    return 0
