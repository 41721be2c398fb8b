"""Chooses the checkpoint positions of prompts, for models whose caches cannot be truncated.

A snapshot is taken at each of these lengths: where later prompts are likely to diverge from the
prompt, where earlier prompts did, and at regular intervals. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

LEAST_STORED = 16  # tokens; computing fewer is as fast as a lookup
_INTERVAL = 128
_NEAR = 8  # tokens; of two closer positions, only the first gets a snapshot


def checkpoint_positions(
    expected: Sequence[int],
    known: Collection[int] | None,
    filled: int,
    last: int,
    most: int,
    uncut: Callable[[int], int],
) -> tuple[set[int], set[int]]:
    """Return the positions at which to take snapshots, and those whose snapshots are copied.

    Snapshots are copied from the source, the KV from which the prefill starts.

    expected: lengths where prompts diverge, the likeliest first.
    known: the lengths at which the source has snapshots; None if it can be truncated to any length.
    filled: number of tokens of the source.
    last: the longest useful length.
    most: maximum number of snapshots.
    uncut: shortens a length that lies inside an image or a sound.
    """
    interval = max(-(-last // max(most - len(expected), 1)), _INTERVAL)
    chosen = [*expected, *range(interval, last - interval // 2, interval)]
    chosen = [uncut(position) for position in chosen if LEAST_STORED <= position <= last]
    chosen = [at for at in chosen if not any(0 < at - other <= _NEAR for other in chosen)]
    ahead = list(dict.fromkeys(at for at in chosen if at > filled))[:most]
    # A sliding window that has not wrapped around yet can still be truncated to any length.
    behind = {at for at in (chosen if known is None else known) if at <= filled}
    return set(ahead), _thinned_out(behind, max(most - len(ahead), 0), last, kept=chosen)


def _thinned_out(
    positions: Collection[int], most: int, end: int, *, kept: Collection[int]
) -> set[int]:
    """Return at most `most` of the positions: first those in `kept`, then others.

    Conversations are usually edited near their end. So positions far from `end` that have close
    neighbours are removed first.
    """
    left = sorted(positions)

    def loss(at: int) -> tuple[bool, float]:
        before = left[at - 1] if at else 0
        after = left[at + 1] if at + 1 < len(left) else end
        return left[at] in kept, (left[at] - before) * (after - left[at]) / (end - left[at] + 1)

    while len(left) > most:
        del left[min(range(len(left)), key=loss)]
    return set(left)
