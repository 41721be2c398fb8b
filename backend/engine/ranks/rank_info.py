"""Describes which rank a process is, and how it reaches the other ranks.

`backend.supervising.supervisor` writes a `RankInfo` into the environment of each process that it
starts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from backend.engine.loading.stages import Stages

Transport = Literal["ring", "jaccl", "nccl", "mpi"]  # the backends of mx.distributed

Parallelism = Literal["tensor", "pipeline"]  # explained in `backend.engine.ranks.sharding`

RANK_INFO = "MLX_BACKEND_RANK_INFO"
TOKEN = "MLX_BACKEND_RANKS_TOKEN"
LAST_LOAD = "MLX_BACKEND_LAST_LOAD"  # the file for `backend.rpc.last_load`
Value = dict[str, Any]  # what ranks exchange during a load, as JSON
Loaded = TypeVar("Loaded")
TIMEOUT = 10.0  # seconds of silence after which a rank counts as lost


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What a process must know of its rank and of the other ranks."""

    rank: int
    size: int
    control: tuple[str, int]  # host and port where rank 0 listens for the other ranks
    hosts: tuple[str, ...]  # the name of each rank's host, for messages
    transport: Transport = "ring"
    # Seconds of silence after which a rank counts as lost, until a load sets another value.
    timeout: float = TIMEOUT
    join_timeout: float = 60.0  # seconds for which a load waits for ranks that have not joined
    # The ports of the ranks in the user's hostfile; empty without a hostfile.
    ports: tuple[int, ...] = ()

    def name(self, rank: int) -> str:
        """Return the number and the host of a rank, for messages."""
        return f"rank {rank} ({self.hosts[rank]})"

    def write(self, environ: MutableMapping[str, str]) -> None:
        environ[RANK_INFO] = json.dumps(asdict(self))

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> RankInfo | None:
        """Return what `write` has written; None in a process that no supervisor has started."""
        if not (text := environ.get(RANK_INFO)):
            return None
        values = json.loads(text)
        host, port = values.pop("control")
        hosts, ports = tuple(values.pop("hosts")), tuple(values.pop("ports"))
        return cls(control=(host, port), hosts=hosts, ports=ports, **values)


@dataclass(frozen=True, slots=True)
class Member:
    """This process as one of the ranks that load a model."""

    info: RankInfo
    # Sends a value to all ranks, waits for their values, and returns all values by rank. Raises an
    # EngineError if the load has failed on another rank. All ranks call `agree` at the same points
    # of a load, with the same MLX collectives in between.
    agree: Callable[[Value], Sequence[Value]]


def until_ended(stages: Stages[Loaded], fault: Callable[[], Exception | None]) -> Stages[Loaded]:
    """Run the stages of a load, but end the load between two stages if another rank has ended it.

    fault: returns the exception to raise in the stages; None while the load continues.
    """
    with contextlib.closing(stages):
        try:
            stage = next(stages)
            while True:
                yield stage
                ended = fault()
                stage = stages.throw(ended) if ended else next(stages)
        except StopIteration as end:
            whole: Loaded = end.value
            return whole
