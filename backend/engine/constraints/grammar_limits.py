"""What a grammar may take until its first mask, in the process that tries it."""

from __future__ import annotations

from typing import Final

from backend.engine.units import MIB

STACK: Final = 32 * MIB
"""Bytes: a few thousand rules or references that lead into each other."""
MARGIN: Final = 8 * MIB
"""Bytes of stack that the backend has beyond, so that what passed the trial passes there."""
QUICK_SECONDS: Final = 0.1
"""Of processor time; a grammar that needs more gives way to others, and is begun again."""
CPU_SECONDS: Final = 3.0
MEMORY: Final = 512 * MIB
READING_DEPTH: Final = 10_000
"""Python's frames, which take C stack too where a hash or an encoder lies between them."""
TOO_LARGE: Final = 70
"""Exit code of a process whose grammar took more than MEMORY."""
