"""The first turn of an agent after a load, with and without a warm prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import peer
from bench.gateway import NAME, served
from bench.pairs import in_turn, ratio
from bench.process import text
from bench.report import Figure, at_most

SYSTEM = text("system", 700)
ROUNDS = 3


def measure(model: Path) -> Iterator[Figure]:
    sides: dict[str, list[dict[str, Any]]] = {"warm": [{"system": SYSTEM}], "cold": []}
    values = in_turn(lambda prompts, _: _first_token(model, prompts), sides, ROUNDS)
    name = "first turn after a load: first token with a warm prompt / without"
    yield at_most(name, *ratio(values, 0.5))


def _first_token(model: Path, prompts: list[dict[str, Any]]) -> float:
    """Return the seconds to the first token of a new gateway's first request."""
    config = {"parameters": {"model": str(model)}, "preload": True, "warm_prompts": prompts}
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Tell me a story."},
    ]
    with served(**config) as (gateway, port):
        if prompts:
            gateway.line_with("read 1 prompts ahead")
        return peer.stream(port, "", 2, model=NAME, messages=messages, ignore_eos=True).first
