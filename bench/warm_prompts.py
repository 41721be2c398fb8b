"""The first turn of an agent after a load, with and without a warm prompt."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import peer
from bench.process import text
from bench.report import Figure, at_most
from tests.gateway.gateway_process import GatewayProcess

SYSTEM = text("system", 700)
ROUNDS = 3
NAME = "bench"


def measure(model: Path) -> Iterator[Figure]:
    cold, warm = [], []
    for _ in range(ROUNDS):
        cold.append(_first_token(model, []))
        warm.append(_first_token(model, [{"system": SYSTEM}]))
    mine, others = map(statistics.median, (warm, cold))
    yield at_most(
        "first turn after a load: first token with a warm prompt / without",
        mine / others,
        0.5,
        f"{mine:.2f} / {others:.2f} s",
    )


def _first_token(model: Path, prompts: list[dict[str, Any]]) -> float:
    """Return the seconds to the first token of a new gateway's first request."""
    config = {
        "parameters": {"model": str(model)},
        "context_size": 8192,
        "preload": True,
        "warm_prompts": prompts,
    }
    gateway = GatewayProcess({NAME: config})
    try:
        if prompts:
            gateway.line_with("read 1 prompts ahead")
        port = urlsplit(gateway.url).port
        assert port is not None
        peer.stream(port, "Hello", 1, model=NAME, ignore_eos=True)  # waits for the load
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "Tell me a story."},
        ]
        return peer.stream(port, "", 2, model=NAME, messages=messages, ignore_eos=True).first
    finally:
        gateway.close()
