"""The perplexity of a text with quantised KV, beside that with the model's own type.

The text is the beginning of docs/architecture.md, in passes of 256 tokens. Keys and values are
quantised as they are appended, so each token attends to quantised ones, its own too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx_lm

from backend.engine.caching import kv
from backend.engine.caching.cache_form import use_cache_kind
from backend.engine.caching.cache_kind import cache_kind
from backend.engine.settings import Settings
from bench.process import ROOT
from bench.report import Table

TEXT = ROOT / "docs" / "architecture.md"
TOKENS = 2048
_PASS = 256
PAIRS = (
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    ("q8_0", "q5_0"),
    ("q8_0", "q4_0"),
    ("f16", "q4_0"),
    ("q4_0", "q8_0"),
    ("q5_0", "q5_0"),
    ("q4_0", "q4_0"),
)


def measure(model: Path) -> Iterator[Table]:
    """Measure one model, in float32 as on a CPU."""
    rows: list[tuple[str, ...]] = []
    plain = 0.0
    for pair in PAIRS:
        network, tokenizer = mlx_lm.load(str(model))[:2]
        network.set_dtype(mx.float32)
        use_cache_kind(network, cache_kind(Settings(), *pair))
        read = tokenizer.encode(TEXT.read_text())[:TOKENS]
        found = _perplexity(network, read)
        plain = plain or found
        cost = kv.cost(network)
        per_token = cost.per_token + sum(own for own, _ in cost.windowed)
        rows.append((*pair, str(per_token), f"{found:.3f}", f"{found / plain:.4f}"))
    header = "keys", "values", "bytes per token", "perplexity", "ratio"
    yield Table(f"{model.name}, {len(read)} tokens of {TEXT.name}", header, rows)


def _perplexity(model: object, tokens: list[int]) -> float:
    row, total = kv.new_row(model), 0.0
    for start in range(0, len(tokens) - 1, _PASS):
        part = tokens[start : min(start + _PASS, len(tokens) - 1)]
        logits = kv.feed_tokens(model, row, [part])[0].astype(mx.float32)
        following = mx.array(tokens[start + 1 : start + 1 + len(part)])[:, None]
        own = mx.take_along_axis(logits, following, axis=-1)[:, 0]
        total += float((mx.logsumexp(logits, axis=-1) - own).sum())
    return math.exp(total / (len(tokens) - 1))
