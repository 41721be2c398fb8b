"""Resource limits for compiling a grammar and its first mask in the child process (see `trial`)."""

from __future__ import annotations

from typing import Final

from backend.engine.units import MIB

STACK: Final = 32 * MIB
"""Bytes; enough for a few thousand nested rules or references."""
MARGIN: Final = 8 * MIB
"""Bytes of stack that the backend adds, so that a grammar that passed the trial also compiles
there."""
QUICK_SECONDS: Final = 0.1
"""Processor time after which a quick trial is stopped; the grammar is then tried as a slow one."""
CPU_SECONDS: Final = 3.0
MEMORY: Final = 512 * MIB
MEMORY_TOGETHER: Final = 1024 * MIB
"""Bytes of all grammars that are in use by requests, as measured in their trials."""
MEMORY_KEPT: Final = 128 * MIB
"""Bytes of the grammars that are remembered for later requests."""
READING_DEPTH: Final = 10_000
"""Recursion limit in Python frames. Hashing and JSON encoding recurse on the C stack too."""
TOO_LARGE: Final = 70
"""Exit code of a process whose grammar needed more than MEMORY."""
NO_PROCESS: Final = 71
"""Exit code where the system allows no more processes or threads."""
