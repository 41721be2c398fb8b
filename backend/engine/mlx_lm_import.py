"""Imports mlx-lm without its side effect on the process.

mlx-lm 0.32.2 sets the limit of open files when it is imported: it lowers a larger limit, and if the
hard limit is smaller, it raises an exception, which would make every load fail.
"""

from __future__ import annotations

import resource
import sys


def import_mlx_lm() -> None:
    """Import mlx-lm without changing the limits of the process."""
    if "mlx_lm.utils" in sys.modules:
        return
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        import mlx_lm.utils  # noqa: F401
    finally:
        resource.setrlimit = setrlimit
