"""The prompt lengths at which snapshots are taken, for models whose caches cannot be truncated.

These are lengths where later prompts are likely to diverge from this one, lengths where earlier
prompts did, and regular intervals for all other cases. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

LEAST_STORED = 16  # tokens; computing fewer is as fast as finding them
_INTERVAL = 128
_NEAR = 8  # tokens; of two places closer than this, only the shorter one gets a snapshot


def snapshot_places(
    expected: Sequence[int],
    known: Collection[int] | None,
    filled: int,
    last: int,
    most: int,
    uncut: Callable[[int], int],
) -> tuple[set[int], set[int]]:
    """The lengths at which to take snapshots, and the lengths at which the source's are kept.

    The source is the KV from which the prefill starts.

    expected: lengths where prompts diverge, the likeliest first.
    known: the lengths at which the source has snapshots; None if it can be truncated anywhere.
    filled: tokens of the source.
    last: the longest useful length.
    most: maximum number of snapshots.
    uncut: shortens a length that lies inside an image or a sound.
    """
    interval = max(-(-last // max(most - len(expected), 1)), _INTERVAL)
    chosen = [*expected, *range(interval, last - interval // 2, interval)]
    chosen = [uncut(place) for place in chosen if LEAST_STORED <= place <= last]
    chosen = [at for at in chosen if not any(0 < at - other <= _NEAR for other in chosen)]
    ahead = list(dict.fromkeys(at for at in chosen if at > filled))[:most]
    # A sliding window that has not wrapped around yet can still be truncated anywhere.
    behind = {at for at in (chosen if known is None else known) if at <= filled}
    return set(ahead), _spread(behind, max(most - len(ahead), 0), last, kept=chosen)


def _spread(places: Collection[int], most: int, end: int, *, kept: Collection[int]) -> set[int]:
    """At most `most` of the places: first those in `kept`, then others, denser towards the end.

    Conversations are usually edited near their end. So places far from `end` that have close
    neighbours are removed first.
    """
    left = sorted(places)

    def loss(at: int) -> tuple[bool, float]:
        before = left[at - 1] if at else 0
        after = left[at + 1] if at + 1 < len(left) else end
        return left[at] in kept, (left[at] - before) * (after - left[at]) / (end - left[at] + 1)

    while len(left) > most:
        del left[min(range(len(left)), key=loss)]
    return set(left)
