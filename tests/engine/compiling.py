"""Turns MLX's compilation of functions on, which tests on a CPU do without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from backend.engine import device


@contextmanager
def compiled() -> Iterator[None]:
    """Compile functions within the block, as on a GPU."""
    device.compile_functions(on=True)
    try:
        yield
    finally:
        if mx.default_device() == mx.Device(mx.cpu):
            device.compile_functions(on=False)
