"""The memory of a pass, measured without the luck of one measurement."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.engine.loading.pass_cost import pass_cost
from backend.engine.planning.plan import PassCost


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the bytes at the peak of a computation, without those that it leaves."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    mx.synchronize()
    return mx.get_peak_memory() - max(mx.get_active_memory(), held)


def steady_cost(model: Any, vocabulary: int, *, bounded: bool = False) -> PassCost:
    """Return the most of several measurements.

    MLX launches operations ahead of the device, and each holds memory until it is computed. In a
    pass of four layers the launching thread may never get as far ahead as it can, if other programs
    use the CPU. In a pass of thirty, it does at some point.

    bounded: as for `pass_cost`.
    """
    costs = [pass_cost(model, vocabulary, bounded=bounded) for _ in range(12)]
    return PassCost(
        **{name: max(getattr(cost, name) for cost in costs) for name in PassCost.__annotations__}
    )


def stored_cost(file: Path, measure: Callable[[], PassCost]) -> PassCost:
    """Return the cost in a file, which another worker may have written, or measure and write it."""
    if not file.exists():
        fresh = file.with_name(f"{file.name}.{os.getpid()}")
        fresh.write_text(json.dumps(asdict(measure())))
        fresh.replace(file)
    return PassCost(**json.loads(file.read_text()))
