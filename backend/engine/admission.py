"""Decides which rows the memory has room for. Pure arithmetic over declared sizes.

The batch is a rectangle: every row is as long as the longest. A row that may run to the end of a
large context is not charged for all of it in advance, or nothing would ever run beside it; it is
charged for a stretch ahead of where it is, and the stretch moves with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.kv import CacheCost
from backend.engine.row import Row

_AHEAD = 2048  # tokens of output that a new row is charged for
_GROWTH = 256  # tokens by which the charge stays ahead of a row


def expected_length(row: Row) -> int:
    """Tokens of prompt and output that the row is charged for now."""
    output = min(row.limit, max(_AHEAD, len(row.generated) + _GROWTH))
    return len(row.prompt) + output


def kv_bytes(cost: CacheCost, rows: Sequence[Row]) -> int:
    """Bytes of KV that the rows are charged for together."""
    if not rows:
        return 0
    return sum(row.width for row in rows) * cost.of(max(expected_length(row) for row in rows))


def bytes_with(cost: CacheCost, rows: Sequence[Row], candidate: Row) -> int:
    """The same with one more row; its prompt stands in memory twice while it joins the batch."""
    return kv_bytes(cost, [*rows, candidate]) + cost.of(len(candidate.prompt))
