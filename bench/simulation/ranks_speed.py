"""How fast a divided model decodes, calculated from bytes and latencies.

Tensor: each rank reads its part of the weights and the KV, and two sums of the hidden states per
layer pass around the ring. Pipeline: the ranks compute one after the other, so nothing gets faster;
each sends the hidden states on, and the last one sends them to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from backend.engine.ranks.place import Way
from bench.report import Table
from bench.simulation.setup import Link, Setup, links, setups

RANKS = (1, 2, 4)
WAYS: tuple[Way, ...] = get_args(Way)
CONTEXT = 2048  # tokens before each request's next one
_BYTES = 2  # of one hidden value


def decode_seconds(
    setup: Setup, link: Link, ranks: int, way: Way, rows: int, context: int
) -> float:
    """Seconds of a decode step of this many rows, each after this many tokens."""
    alone = setup.decode_seconds(rows, context)
    if ranks == 1:
        return alone
    states = rows * setup.model.hidden * _BYTES
    launch = setup.machine.launch
    if way == "pipeline":
        hand_over = link.latency + states / link.bandwidth
        # The parts run one after the other. Each border adds a launch, and two transfers: one of
        # the states to the next part, and one of the result around the ring.
        return alone + (ranks - 1) * (launch + 2 * hand_over)
    # A ring all-reduce makes this many transfers, each of 1/ranks of the states.
    hops = 2 * (ranks - 1)
    one_sum = hops * (link.latency + states / ranks / link.bandwidth)
    return (alone - launch) / ranks + launch + 2 * setup.model.blocks * one_sum


def tokens_per_second(
    setup: Setup, link: Link, ranks: int, way: Way, rows: int, context: int
) -> float:
    """Tokens per second of all rows together."""
    return rows / decode_seconds(setup, link, ranks, way, rows, context)


def tables() -> Iterator[Table]:
    """A table for each model on its machine.

    Rows are links and kinds of parallelism, columns are numbers of ranks.
    """
    for setup in setups():
        header = [
            "link",
            "way",
            *(f"{n} ranks, {rows}" for rows in (1, setup.slots) for n in RANKS),
        ]
        lines = [
            [
                link.name,
                way,
                *(
                    f"{tokens_per_second(setup, link, ranks, way, rows, CONTEXT):.0f}"
                    for rows in (1, setup.slots)
                    for ranks in RANKS
                ),
            ]
            for link in links()
            for way in WAYS
        ]
        title = f"{setup.name}: tokens per second of 1 and of {setup.slots} requests on ranks"
        yield Table(title, header, lines)
