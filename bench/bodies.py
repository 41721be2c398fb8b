"""How long one request of 1 MB holds the gateway's event loop, for every list of every API.

The body is filled with the smallest entries of a list, up to the number that the list may have.
Processor time of the event loop's thread is counted, so a busy machine changes little.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.report import Figure, at_most
from tests.gateway.many_entries import Case, Schemas, Served, served

SIZE = 1_000_000  # bytes
LONGEST = 100.0  # ms
ROUNDS = 3


def measure() -> Iterator[Figure]:
    """The longest step of the event loop for each API, over all its lists."""
    for path, (held, case, status) in sorted(asyncio.run(_longest()).items()):
        place = str(case).removeprefix(path).strip()
        yield at_most(f"event loop held by 1 MB, {path}", held, LONGEST, f"ms, {status}, {place}")


async def _longest() -> dict[str, tuple[float, Case, int]]:
    found: dict[str, tuple[float, Case, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with served(Path(folder)) as gateway:
            schemas = Schemas(gateway.app.openapi())
            gc.freeze()  # as the gateway does
            for case in schemas.cases():
                held, status = await _held(gateway, case.path, _body(schemas, case))
                if held > found.get(case.path, (0.0, case, 0))[0]:
                    found[case.path] = held, case, status
    return found


async def _held(gateway: Served, path: str, body: bytes) -> tuple[float, int]:
    """Milliseconds of the longest step, the least of several requests, and the status."""
    costs = [await gateway.cost(path, body) for _ in range(ROUNDS)]
    return min(held for _, held, _ in costs) * 1000, costs[0][2]


def _body(schemas: Schemas, case: Case) -> bytes:
    one, many = (len(json.dumps(schemas.body(case, count))) for count in (1, 101))
    count = max(SIZE * 100 // (many - one + 100), 1)
    return json.dumps(schemas.body(case, min(count, schemas.most(case) or count))).encode()
