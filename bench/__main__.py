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
    constraints,
    cpu_install,
    drafting,
    gateway,
    gpu,
    growth,
    host,
    latency,
    memory,
    overload,
    parsing,
    peers,
    prefix,
    quantised,
    ranks,
    sampling,
    startup,
    turnover,
    vision,
)
from bench.measured_backend import keep_order
from bench.process import ROOT
from bench.report import Figure, Table
from bench.simulation import measure as simulation
from bench.soak import measure as soak
from bench.soak import three_models
from cli.default_model import ensure

TINY = ROOT / "tests" / "models" / "tiny_text"
TINY_VISION = ROOT / "tests" / "models" / "tiny_vision"
TINY_OMNI = ROOT / "tests" / "models" / "tiny_omni"
TINY_DRAFT = ROOT / "tests" / "models" / "tiny_draft"

Measurement = Callable[[], Iterator[Figure | Table]]


def measurements() -> dict[str, Measurement]:
    """All measurements by name, in the order in which they run."""
    chosen: dict[str, Measurement] = {
        "startup": startup.measure,
        "prefix": lambda: prefix.measure(ensure(), TINY),
        "latency": lambda: latency.measure(ensure()),
        "peers": lambda: peers.measure(ensure()),
        "blas": lambda: peers.blas(ensure()),
        "overhead": lambda: peers.overhead(TINY),
        "gpu": gpu.measure,
        "overload": lambda: overload.measure(ensure()),
        "turnover": turnover.measure,
        "ranks": ranks.measure,
        "memory": lambda: memory.measure(ensure()),
        "quantised": lambda: quantised.measure(ensure()),
        "sampling": sampling.measure,
        "host": lambda: host.measure(TINY),
        "constraints": lambda: constraints.measure(ensure()),
        "drafting": lambda: drafting.lookup(ensure()),
        "draft-model": lambda: drafting.draft_model(TINY, TINY_DRAFT),
        "drafters": lambda: drafting.drafters(TINY),
        "vision": lambda: vision.measure(TINY_VISION),
        "gateway": lambda: gateway.measure(ensure()),
        "bodies": bodies.measure,
        "parsing": lambda: parsing.measure(TINY),
        "growth": growth.measure,
        "simulation": simulation.measure,
        "soak": lambda: soak.measure(TINY, TINY_VISION),
        "soak-gateway": lambda: three_models.measure(TINY, TINY_OMNI),
    }
    if (ROOT / "venv" / "lib" / "openblas").is_dir():
        chosen["cpu-install"] = lambda: cpu_install.measure(ensure())
    return chosen


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
