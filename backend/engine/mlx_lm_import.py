"""Imports mlx-lm without what it does to the process.

mlx-lm 0.32.2 sets the limit of open files as it is imported: it lowers a larger one, and where the
hard limit is smaller it raises, which would make every load fail.
"""

from __future__ import annotations

import resource
import sys


def import_mlx_lm() -> None:
    """Import mlx-lm; the limits of the process stay as they are."""
    if "mlx_lm.utils" in sys.modules:
        return
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        import mlx_lm.utils  # noqa: F401
    finally:
        resource.setrlimit = setrlimit
