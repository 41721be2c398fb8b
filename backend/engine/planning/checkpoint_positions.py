"""Chooses the checkpoint positions of prompts, for models whose caches cannot be truncated.

A checkpoint position is a prompt length at which a snapshot is taken. There are positions where
later prompts are likely to diverge from the prompt, where earlier prompts have diverged, and at
regular intervals. All functions are pure.
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
    """Return the positions of new snapshots, and the positions of snapshots to copy.

    Snapshots are copied from the source: the KV with which the prefill starts.

    expected: lengths at which prompts probably diverge, the likeliest first.
    known: lengths at which the source has snapshots; None if it can be truncated to any length.
    filled: number of tokens of the source.
    last: the longest useful length.
    most: maximum number of snapshots.
    uncut: shortens a length that lies inside an image or audio to the start of that item.
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
    """Return at most `most` of the positions.

    Conversations are usually edited near their end. So positions far from the end with close
    neighbours are removed first.

    end: length of the prompt without its last token.
    kept: positions that are removed only after all others.
    """
    left = sorted(positions)

    def loss(at: int) -> tuple[bool, float]:
        before = left[at - 1] if at else 0
        after = left[at + 1] if at + 1 < len(left) else end
        return left[at] in kept, (left[at] - before) * (after - left[at]) / (end - left[at] + 1)

    while len(left) > most:
        del left[min(range(len(left)), key=loss)]
    return set(left)
