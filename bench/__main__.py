"""`make bench`: runs the measurements and lists missed goals.

BENCH="prefix drafting" runs only the measurements that it names. With ORDER=gpu, backends work
in the order of a GPU, whatever their device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

from bench import (
    adapters,
    context,
    drafting,
    experts,
    gateway,
    gpu,
    growth,
    host,
    kv_quality,
    latency,
    overload,
    peers,
    prefix,
    simulation,
    speech,
    startup,
    warm_prompts,
)
from bench.checkpoint import TINY
from bench.measured_backend import keep_order
from bench.process import ROOT
from bench.report import Figure, Table
from cli.default_model import ensure

TINY_DRAFT = ROOT / "tests" / "models" / "tiny_draft"

Measurement = Callable[[], Iterator[Figure | Table]]


def measurements() -> dict[str, Measurement]:
    """Return all measurements by name, in the order in which they run."""
    return {
        "startup": startup.measure,
        "prefix": lambda: prefix.measure(ensure()),
        "latency": lambda: latency.measure(ensure()),
        "peers": lambda: peers.measure(ensure()),
        "overhead": lambda: peers.overhead(TINY),
        "gpu": gpu.measure,
        "overload": lambda: overload.measure(ensure()),
        "host": lambda: host.measure(TINY),
        "drafting": lambda: drafting.measure(ensure(), TINY, TINY_DRAFT),
        "kv-quality": lambda: kv_quality.measure(ensure()),
        "experts": experts.measure,
        "adapters": lambda: adapters.measure(ensure()),
        "context": lambda: context.measure(ensure()),
        "warm-prompts": lambda: warm_prompts.measure(ensure()),
        "speech": speech.measure,
        "gateway": lambda: gateway.measure(ensure()),
        "growth": growth.measure,
        "simulation": simulation.measure,
    }


def main(names: list[str]) -> int:
    known = measurements()
    if unknown := set(names) - set(known):
        print(f"bench: no measurement {', '.join(unknown)}: choose from {', '.join(known)}")
        return 2
    order = os.environ.get("ORDER", "")
    if order not in ("", "gpu"):
        print(f"bench: ORDER is {order!r}: set it to gpu, or leave it out")
        return 2
    keep_order(order)
    missed = 0
    for name in names or known:
        for figure in known[name]():
            print(figure, flush=True)
            missed += figure.met is False
    print(f"{missed} goals missed" if missed else "every goal is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
