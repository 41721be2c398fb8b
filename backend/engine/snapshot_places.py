"""Where snapshots of a prompt are taken, for models whose caches cannot all be cut back.

Pure: later prompts are likely to part from this one at some lengths, earlier ones did at others,
and even intervals serve those that part where nobody expected it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

LEAST_STORED = 16  # tokens; fewer are computed as fast as they are found
_INTERVAL = 128
_NEAR = 8  # tokens; of two snapshots so near to each other, the shorter serves for both


def snapshot_places(
    expected: Sequence[int],
    known: Collection[int] | None,
    filled: int,
    last: int,
    most: int,
    uncut: Callable[[int], int],
) -> tuple[set[int], set[int]]:
    """The lengths at which to take snapshots, and those of which the source's are kept.

    expected: where prompts part, the most likely first. known: the lengths at which the source has
    snapshots; None: it can be cut back anywhere. filled: tokens that the source gives. last: the
    longest length that is of use. most: snapshots in all. uncut: shortens a length that would cut
    through an image or a sound.
    """
    interval = max(-(-last // max(most - len(expected), 1)), _INTERVAL)
    wanted = [*expected, *range(interval, last - interval // 2, interval)]
    wanted = [uncut(place) for place in wanted if LEAST_STORED <= place <= last]
    wanted = [at for at in wanted if not any(0 < at - other <= _NEAR for other in wanted)]
    ahead = list(dict.fromkeys(at for at in wanted if at > filled))[:most]
    # A window that has not turned over yet can still be cut back anywhere.
    behind = {at for at in (wanted if known is None else known) if at <= filled}
    return set(ahead), _spread(behind, max(most - len(ahead), 0), last, kept=wanted)


def _spread(places: Collection[int], most: int, end: int, *, kept: Collection[int]) -> set[int]:
    """At most `most` of the places: those in `kept`, and others the denser the nearer to the end.

    Conversations are edited near their end, so a place costs the more the farther its neighbours
    are and the nearer it is to `end`.
    """
    left = sorted(places)

    def loss(at: int) -> tuple[bool, float]:
        before = left[at - 1] if at else 0
        after = left[at + 1] if at + 1 < len(left) else end
        return left[at] in kept, (left[at] - before) * (after - left[at]) / (end - left[at] + 1)

    while len(left) > most:
        del left[min(range(len(left)), key=loss)]
    return set(left)
