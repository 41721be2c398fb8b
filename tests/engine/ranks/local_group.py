"""Rank 0 in this process, and the other ranks as real processes."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from backend.engine.load_request import LoadRequest
from backend.engine.loading.loader import load
from backend.engine.loading.stages import at_once
from backend.engine.model import EngineModel
from backend.engine.planning.plan import PassCost
from backend.engine.ranks.leader import Leader
from backend.engine.ranks.rank_info import TOKEN, RankInfo
from backend.engine.token_text import ByteStream
from backend.supervising.supervisor import free_ports

ROOT = Path(__file__).parents[3]
_TABLE = [f"<{token}>".encode() for token in range(1 << 16)]


def start_here(command: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environ, cwd=ROOT)


class LocalGroup:
    """A process can form only one MLX group in its life.

    If the group fails, this process ends with the rank's error, because a thread may wait in a
    collective for ever. module: the program of the other ranks. hosts: of each rank; by default all
    are on the loopback interface. failing: whether a failure is expected, and only recorded in
    `causes`.
    """

    def __init__(
        self,
        size: int,
        module: str = "backend",
        hosts: Sequence[str] = (),
        start: Callable[[list[str], dict[str, str]], subprocess.Popen[bytes]] = start_here,
        *,
        failing: bool = False,
    ) -> None:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        ports = free_ports(size + 1)
        hostfile = folder / "hosts.json"
        hosts = hosts or ("127.0.0.1",) * size
        ring = zip(hosts, ports[1:], strict=True)
        hostfile.write_text(json.dumps([[f"{host}:{port}"] for host, port in ring]))
        token = secrets.token_hex(8)
        info = RankInfo(0, size, (hosts[0], ports[0]), ("here",) * size, timeout=60.0)
        self.causes: list[str] = []
        self._failing = failing
        self._loads = 0
        self.others: list[subprocess.Popen[bytes]] = []
        for rank in range(1, size):
            environ = {**os.environ, TOKEN: token, "PYTHONPATH": str(ROOT)}
            environ |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)}
            replace(info, rank=rank).write(environ)
            self.others.append(start([sys.executable, "-m", module], environ))
        os.environ |= {"MLX_RANK": "0", "MLX_HOSTFILE": str(hostfile)}
        self.leader = Leader(info, token)
        self.leader.open(self._fail)

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, _: TracebackType | None
    ) -> None:
        self.leader.close()
        for other in self.others:
            other.wait(120)
        self._stack.close()

    def load(self, model: Path, **settings: object) -> EngineModel:
        """A model that the ranks divide."""
        return _loaded(model, self._number(), settings, self.leader)

    def whole(self, model: Path, **settings: object) -> EngineModel:
        """The group's model, loaded in this process alone."""
        return _loaded(model, self._number(), settings, None)

    def _fail(self, cause: str) -> None:
        self.causes.append(cause)
        if not self._failing:
            print(f"the group of ranks has failed: {cause}", file=sys.stderr, flush=True)
            for other in self.others:
                other.kill()
            self._stack.close()
            os._exit(1)

    def _number(self) -> int:
        self._loads += 1
        return self._loads


def _loaded(
    model: Path, number: int, settings: dict[str, object], leader: Leader | None
) -> EngineModel:
    given = {
        "load_trial": False,
        "prompt_cache_mib": 64,
        "memory_limit_mib": 512,
        "rank_timeout": 60,
    } | settings
    request = LoadRequest("model", str(model), settings=given)
    built, _, _ = at_once(load(request, number, threading.Event(), leader))
    assert built is not None
    return replace(
        built,
        new_text=lambda _: ByteStream(_TABLE.__getitem__, strip_first_space=False),
        end_tokens=frozenset({0}),
        disk=None,
        prefill_chunk=32,
        passes=PassCost(),  # the memory limit in these schedules is a number of tokens of KV
    )
