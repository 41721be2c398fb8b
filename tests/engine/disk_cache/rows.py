"""Small models of every kind of KV, their rows, and disk caches for them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from backend.engine.caching import kv
from backend.engine.caching.cache_kind import CacheKind
from backend.engine.disk_cache.cache import DiskCache
from backend.engine.disk_cache.layout import learn_layout
from backend.engine.units import MIB
from tests.engine.kv_models import use_kind
from tests.engine.random_models import CONFIGS, VOCABULARY, random_model

PAIRS = {"8 and 4 bits": "full", "a window of 8 and 4 bits": "window"}
KINDS = (*CONFIGS, "quantised", "bfloat16", *PAIRS)
IDENTITY = "0123456789abcdef" * 2
PATIENCE = 120.0  # seconds that a test waits for the disk thread


@cache
def model_of(kind: str) -> Any:
    """A model whose rows are of the kind: one of `random_models`, quantised, or in bfloat16."""
    if kind in CONFIGS:
        return random_model(kind)
    config = CONFIGS[PAIRS.get(kind, "full")] | {"head_dim": 32}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(7), 100))

    def fill(weight: mx.array) -> mx.array:
        value = 0.3 * mx.random.normal(weight.shape, key=next(keys)) + (weight.ndim < 2)
        return value.astype(mx.bfloat16) if kind == "bfloat16" else value

    model.update(tree_map(fill, model.parameters()))
    if kind == "quantised":
        use_kind(model, CacheKind(8, 8, 32))
    elif kind in PAIRS:
        use_kind(model, CacheKind(8, 4, 32))
    return model


def words(count: int, start: int = 1) -> list[int]:
    """A text of that many tokens, the same at every call."""
    return [(start + 7 * at * at + at) % (VOCABULARY - 1) + 1 for at in range(count)]


def feed(model: Any, row: kv.RowCache, tokens: Sequence[int]) -> mx.array:
    """The logits after the last token; steps of 32, as prefill takes them."""
    logits = None
    for start in range(0, len(tokens), 32):
        logits = model(mx.array([tokens[start : start + 32]]), cache=row)
        kv.evaluate(row)
    assert logits is not None
    last: mx.array = logits[0, -1]
    return last


def filled(model: Any, tokens: Sequence[int]) -> kv.RowCache:
    """A row with the KV of the tokens."""
    row = kv.new_row(model)
    feed(model, row, tokens)
    return row


def greedy(model: Any, row: kv.RowCache, tokens: Sequence[int], count: int) -> list[int]:
    """Feed the tokens, then return the next `count` greedy ones."""
    answer: list[int] = []
    step = list(tokens)
    for _ in range(count):
        step = [cast(int, mx.argmax(feed(model, row, step)).item())]
        answer += step
    return answer


def same(left: kv.RowCache, right: kv.RowCache) -> bool:
    """Whether two rows hold the same bits."""
    pairs = zip(_parts(left), _parts(right), strict=True)
    return all(
        mx.array_equal(one, other).item() if isinstance(one, mx.array) else one == other
        for one, other in pairs
    )


def _parts(row: kv.RowCache) -> list[Any]:
    copy = kv.clone(row)
    kv.trim(copy, 0)
    leaves: dict[str, Any] = {}
    tree_flatten([layer.state for layer in copy], destination=leaves)
    return list(leaves.values())


def disk_cache(model: Any, folder: Path | None, **changes: Any) -> DiskCache:
    """A cache for a model's rows."""
    layout = learn_layout(model)
    assert layout is not None
    settings: dict[str, Any] = {"identity": IDENTITY, "max_bytes": 64 * MIB, "copy": False}
    settings |= changes
    return DiskCache(layout, folder=folder, **settings)


def saved(disk: DiskCache, model: Any, tokens: Sequence[int], path: Path | None = None) -> None:
    """Compute the tokens' KV and have it written."""
    row = filled(model, tokens)
    disk.save(tokens, row, trimmable=kv.can_trim(row), path=path)
    assert disk.drain(PATIENCE)


def entries_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))
