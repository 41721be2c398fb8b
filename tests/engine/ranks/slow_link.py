"""`python -m tests.engine.ranks.slow_link NEAR FAR`: a link between two TUN devices, by descriptor.

Every packet arrives 20 ms later. For each line on standard input, what arrives in the next two
seconds is dropped, and the number of those packets is printed.
"""

from __future__ import annotations

import collections
import os
import select
import sys
import time

_DELAY = 0.02  # seconds
_DROPS = 2.0
_MOST_BYTES = 1 << 16


def main(near: int, far: int) -> None:
    other = {near: far, far: near}
    under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    until, dropped = 0.0, 0
    while True:
        wait = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else None
        if until:
            wait = min(wait if wait is not None else _DROPS, 0.1)
        ready, _, _ = select.select([near, far, 0], [], [], wait)
        now = time.monotonic()
        if until and now >= until:
            print(dropped, flush=True)
            until, dropped = 0.0, 0
        for one in ready:
            if one == 0:
                if not os.read(0, 4096):
                    return
                until = now + _DROPS
                continue
            packet = os.read(one, _MOST_BYTES)
            if until:
                dropped += 1
            else:
                under_way.append((now + _DELAY, other[one], packet))
        while under_way and under_way[0][0] <= now:
            _, to, packet = under_way.popleft()
            os.write(to, packet)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
