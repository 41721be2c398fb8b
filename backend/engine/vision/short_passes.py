"""Computes short passes of Qwen3.5's linear attention by its recurrence, as decode steps are.

Without Metal, mlx-vlm computes every pass of more than one token by a scan over chunks of
64 tokens (`qwen3_5/gated_delta.py`), padded to whole chunks. For a pass that checks a few guesses,
that takes several times as long as the recurrence, and its log-probabilities differ by up to 0.002
from those of decode steps.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

_MODULE = "mlx_vlm.models.qwen3_5.gated_delta"
_SHORT = 16  # tokens; with 32, the scan was faster on a CPU


def recur_in_short_passes() -> None:
    """Patch mlx-vlm's scan, if a model that uses it has been built. Repeated calls do nothing."""
    module: Any = sys.modules.get(_MODULE)
    if module is None or hasattr(module.gated_delta_chunked, "__wrapped__"):
        return
    scan, recur = module.gated_delta_chunked, module.gated_delta_ops

    @wraps(scan)
    def either(q: Any, *others: Any) -> Any:
        return (recur if q.shape[1] <= _SHORT else scan)(q, *others)

    module.gated_delta_chunked = either
