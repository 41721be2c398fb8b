"""`python -m bench.measured_backend`: the backend, with `mlx_peak` in Status's memory.

With ORDER=gpu it works in the order of a GPU, whatever its device.
"""

from __future__ import annotations

import os
import sys

from backend import __main__ as entry
from backend.engine import device
from backend.engine.worker import Worker


def keep_order(order: str) -> None:
    """Let this process work in the order of a GPU if `order` is `gpu`."""
    if order == "gpu":
        device.may_wait_within_a_step = lambda: False


def main() -> int:
    keep_order(os.environ.get("ORDER", ""))
    measure = Worker._memory

    def with_peak(self: Worker) -> dict[str, int]:
        parts = measure(self)
        if parts:
            import mlx.core as mx

            parts["mlx_peak"] = mx.get_peak_memory()
        return parts

    Worker._memory = with_peak  # type: ignore[method-assign]
    return entry.main(sys.argv[1:], os.environ)


if __name__ == "__main__":
    os._exit(main())
