"""A stand-in for OpenCV, which mlx-vlm's multi_modality imports to scale an image for one tower.

OpenCV is 150 MB, and the build that mlx-vlm requires needs libGL, which servers lack.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

_MODULE: Any = ModuleType("cv2")


@contextmanager
def opencv_replaced() -> Iterator[None]:
    """Let modules that are imported meanwhile find the stand-in as `cv2`."""
    own = sys.modules.get("cv2")
    sys.modules["cv2"] = _MODULE
    try:
        yield
    finally:
        del sys.modules["cv2"]
        if own is not None:
            sys.modules["cv2"] = own


def _resize(image: Any, dsize: tuple[int, int], *, interpolation: Any, **_: Any) -> Any:
    """Scale float32 [height, width, channels] to `dsize`, its width and height."""
    channels = (Image.fromarray(image[..., at]) for at in range(image.shape[-1]))
    return np.stack([np.asarray(one.resize(dsize, interpolation)) for one in channels], axis=-1)


_MODULE.resize = _resize
_MODULE.INTER_LANCZOS4 = Image.Resampling.LANCZOS
_MODULE.INTER_NEAREST = Image.Resampling.NEAREST
