"""Checks that the parts in `Status` add up to MLX's memory, during mixed requests and after."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.peers import text
from bench.process import backend, stream
from bench.report import Figure, at_most, fact
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

REQUESTS = 12
PARTS = ("weights", "kv_cache", "prompt_cache", "logits", "draft_kv_cache", "media_features")
_EVERY = 0.05  # seconds between two measurements


def measure(model: Path) -> Iterator[Figure]:
    with backend(model, Options=["parallel:8"]) as stub:
        samples = [_breakdown(stub)]
        over = threading.Event()
        with ThreadPoolExecutor(REQUESTS) as pool:
            running = [
                pool.submit(stream, stub, text(f"mixed {n}", 20 + 60 * n), 8 + 2 * n)
                for n in range(REQUESTS)
            ]
            watch = threading.Thread(target=_record, args=(stub, samples, over))
            watch.start()
            for one in running:
                one.result()
            over.set()
            watch.join()
        samples.sort(key=_error)
        yield _figure("while requests run, median", samples[len(samples) // 2])
        yield fact("the same, at worst", _error(samples[-1]), _parts_line(samples[-1]))
        while (rest := _breakdown(stub))["kv_cache"]:
            time.sleep(_EVERY)
        yield _figure("at rest", rest)


def _record(stub: BackendStub, samples: list[dict[str, int]], over: threading.Event) -> None:
    while not over.wait(_EVERY):
        samples.append(_breakdown(stub))


def _breakdown(stub: BackendStub) -> dict[str, int]:
    return dict(stub.Status(pb.HealthMessage(), timeout=60).memory.breakdown)


def _error(sample: dict[str, int]) -> float:
    parts = sum(sample.get(part, 0) for part in PARTS)
    return abs(parts - sample["mlx_active"]) / sample["mlx_active"]


def _figure(when: str, sample: dict[str, int]) -> Figure:
    return at_most(
        f"error of the sum of Status's parts, {when}", _error(sample), 0.05, _parts_line(sample)
    )


def _parts_line(sample: dict[str, int]) -> str:
    parts = " + ".join(str(sample[part] >> 20) for part in PARTS if part in sample)
    return f"{parts} of {sample['mlx_active'] >> 20} MiB"
