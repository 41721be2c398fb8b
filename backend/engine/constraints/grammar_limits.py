"""Resource limits for a grammar up to its first mask, in the process that tries it."""

from __future__ import annotations

from typing import Final

from backend.engine.units import MIB

STACK: Final = 32 * MIB
"""Bytes; enough for a few thousand nested rules or references."""
MARGIN: Final = 8 * MIB
"""Bytes of additional stack in the backend, so that what passed the trial passes there too."""
CPU_SECONDS: Final = 3.0
MEMORY: Final = 512 * MIB
READING_DEPTH: Final = 10_000
"""Recursion limit in Python frames, which may use the C stack too (hashing, encoders)."""
TOO_LARGE: Final = 70
"""Exit code of a process whose grammar needed more than MEMORY."""
