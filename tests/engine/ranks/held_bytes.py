"""`python -m tests.engine.ranks.held_bytes FOLDER`: is rank 0 of two, and measures itself.

Prints as JSON, for each way of dividing a model, the bytes that this rank's part should take, those
that MLX allocated, and those that the process read.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import psutil
from mlx.utils import tree_flatten

from backend.engine.loading import text_builder, weights
from backend.engine.loading.traits import measure
from tests.engine.ranks.divided_models import write_divided
from tests.engine.ranks.local_group import LocalGroup
from tests.engine.rounds import MIB

_LAYERS = 9
_CONFIG = {
    "hidden_size": 240,
    "intermediate_size": 960,
    "head_dim": 40,
    "num_hidden_layers": _LAYERS,
}
# How the model is divided, and the memory of one rank in MiB; the other has 512.
_CASES = {"tensor": ("tensor", 512), "pipeline": ("pipeline", 512), "uneven": ("pipeline", 256)}


def main(folder: Path) -> None:
    found = {}
    model = write_divided(folder, "qwen2", shards=4, **_CONFIG)
    with LocalGroup(2) as group:
        whole = dict(tree_flatten(group.whole(model).model.parameters()))
        everywhere = sum(one.nbytes for name, one in whole.items() if ".layers." not in name)
        layers = sum(one.nbytes for one in whole.values()) - everywhere
        del whole
        for case, (way, limit) in _CASES.items():
            gc.collect()
            mx.clear_cache()
            mx.reset_peak_memory()
            before, read = mx.get_active_memory(), _read()
            peaks: list[int] = []
            with (
                patch.object(weights, "memory_limit", return_value=limit * MIB),
                patch.object(weights, "_SLICE_BYTES", MIB),  # much less than the model
                patch.object(text_builder, "measure", _noting(peaks)),
            ):
                loaded = group.load(model, parallelism=way)
            found[case] = {
                "layers": layers,
                "everywhere": everywhere,
                "words": [shard["words"] for shard in group.leader.shards],
                "shards": [shard["bytes"] for shard in group.leader.shards],
                "held": mx.get_active_memory() - before,
                "peak": peaks[0] - before,
                "read": _read() - read,
            }
            del loaded
            group.leader.drop()
    print(json.dumps(found))


def _noting(peaks: list[int]) -> Any:
    """The first step after the weights are loaded, which first notes the peak memory until then."""

    def noting(*arguments: Any) -> Any:
        peaks.append(mx.get_peak_memory())
        return (yield from measure(*arguments))

    return noting


def _read() -> int:
    """Bytes that this process has read; 0 where the system does not count them."""
    counters = getattr(psutil.Process(), "io_counters", None)
    return counters().read_chars if counters is not None else 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
