"""Computes the default memory limit for all loaded models: the device's memory less a reserve.

Each backend computes the same limit for itself, without regard to other backends.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from common.machine_memory import machine_memory, reserve

_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_TIME_LIMIT = 10.0  # seconds
_BUILDS = ("mlx-cuda-12", "mlx-cuda-13")  # builds of MLX for NVIDIA's devices


def device_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that models can use on this machine.

    This is the memory of the first graphics card, or what macOS allows Metal to use, or else the
    RAM that the machine and its control groups allow this process.
    """
    if sys.platform == "darwin":
        return machine_memory(root) * 2 // 3
    card = _card() if has_graphics() else 0
    if card:
        return card - min(1 << 30, card // 4)
    memory = machine_memory(root)
    return memory - reserve(memory)


def has_graphics() -> bool:
    """Return whether the installed build of MLX computes on a graphics processor."""
    return sys.platform == "darwin" or any(map(_is_installed, _BUILDS))


def _is_installed(package: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(package))
    return False


def _card() -> int:
    """Return the bytes of the first graphics card; 0 if the driver does not report them."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        report = subprocess.run(_QUERY, capture_output=True, check=True, timeout=_TIME_LIMIT)
        return int(report.stdout.split()[0]) << 20
    return 0
