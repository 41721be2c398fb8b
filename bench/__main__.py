"""`make bench`: runs the measurements and lists missed goals.

BENCH="prefix drafting:json" runs only the measurements that it names. With ORDER=gpu, backends work
in the order of a GPU, whatever their device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial

from bench import (
    bodies,
    drafting,
    gateway,
    gpu,
    growth,
    host,
    latency,
    overload,
    parsing,
    peers,
    prefix,
    startup,
    turnover,
)
from bench.measured_backend import keep_order
from bench.process import ROOT
from bench.report import Figure, Table
from bench.simulation import measure as simulation
from cli.default_model import ensure

TINY = ROOT / "tests" / "models" / "tiny_text"
TINY_DRAFT = ROOT / "tests" / "models" / "tiny_draft"

Measurement = Callable[[], Iterator[Figure | Table]]


def measurements() -> dict[str, Measurement]:
    """All measurements by name, in the order in which they run."""
    return {
        "startup": startup.measure,
        "prefix": lambda: prefix.measure(ensure(), TINY),
        "latency": lambda: latency.measure(ensure()),
        "peers": lambda: peers.measure(ensure()),
        "blas": lambda: peers.blas(ensure()),
        "overhead": lambda: peers.overhead(TINY),
        "gpu": gpu.measure,
        "overload": lambda: overload.measure(ensure()),
        "turnover": turnover.measure,
        "host": lambda: host.measure(TINY),
        "drafting": lambda: drafting.lookup(ensure()),
        "draft-model": lambda: drafting.draft_model(TINY, TINY_DRAFT),
        "gateway": lambda: gateway.measure(ensure()),
        "bodies": bodies.measure,
        "parsing": lambda: parsing.measure(TINY),
        "growth": growth.measure,
        "simulation": simulation.measure,
    }


def parts() -> dict[str, Measurement]:
    """Parts of long measurements, by their own names."""
    found: dict[str, Measurement] = {
        f"drafting:{text.key}": partial(_lookup, text) for text in drafting.TEXTS
    }
    return found | {
        f"draft-model:{text.key}": partial(drafting.draft_model, TINY, TINY_DRAFT, (text,))
        for text in drafting.TINY_TEXTS
    }


def _lookup(text: drafting.Text) -> Iterator[Figure | Table]:
    return drafting.lookup(ensure(), (text,))


def main(names: list[str]) -> int:
    every = measurements()
    known = every | parts()
    if {"-h", "--help"} & set(names):
        print(
            f"usage: make bench BENCH='[NAME…]'; without a name all but the parts (a:b) run\n"
            f"names: {', '.join(known)}"
        )
        return 0
    if unknown := set(names) - set(known):
        print(f"bench: no measurement {', '.join(unknown)}: choose from {', '.join(known)}")
        return 2
    order = os.environ.get("ORDER", "")
    if order not in ("", "gpu"):
        print(f"bench: ORDER is {order!r}: set it to gpu, or leave it out")
        return 2
    keep_order(order)
    missed = 0
    for name in names or every:
        for figure in known[name]():
            print(figure, flush=True)
            missed += figure.met is False
    print(f"{missed} goals missed" if missed else "every goal is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
