"""Describes which rank a process is, and how it reaches the other ranks.

`backend.supervising.supervisor` writes a `RankInfo` into the environment of each process that it
starts. A hostfile has an address for each rank.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import stat
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from backend.engine.errors import InvalidRequest
from backend.engine.loading.stages import Stages

Transport = Literal["ring", "jaccl", "nccl", "mpi"]  # the backends of mx.distributed

Parallelism = Literal["tensor", "pipeline"]  # explained in `backend.engine.ranks.sharding`

RANK_INFO = "MLX_BACKEND_RANK_INFO"
TOKEN = "MLX_BACKEND_RANKS_TOKEN"
LAST_LOAD = "MLX_BACKEND_LAST_LOAD"  # the file for `backend.rpc.last_load`
Value = dict[str, Any]  # what ranks exchange during a load, as JSON
Loaded = TypeVar("Loaded")
TIMEOUT = 10.0  # seconds of silence after which a rank counts as lost
_DEVICES = ("MLX_IBV_DEVICES", "JACCL_IBV_DEVICES")
_MOST_BYTES = 1 << 20
_CONTROL_OFFSET = 1000  # added to the port of rank 0 in the hostfile: its port for the other ranks


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


class Misuse(InvalidRequest):
    """The command line, environment, hostfile or an option of a load is wrong."""


def hosts_of(path: str) -> list[tuple[str, int]]:
    """Return the first address of each rank in a hostfile. Raises Misuse.

    A hostfile is a JSON list, as for MLX, with an address such as `"10.0.0.1:5000"` or a list of
    addresses for each rank.
    """
    try:
        entries: Any = json.loads(_content(path))
    except (OSError, ValueError, RecursionError) as fault:
        reason = getattr(fault, "strerror", None) or "it is not JSON"
        raise Misuse(f"the hostfile {path} cannot be read: {reason}") from None
    hosts = []
    for entry in entries if isinstance(entries, list) else ():
        first = entry[0] if isinstance(entry, list) and entry else entry
        address = _address_in(first) if isinstance(first, str) else None
        if address is None:
            raise Misuse(f"the hostfile {path} has the entry {entry!r}, which is not HOST:PORT")
        hosts.append(address)
    if len(hosts) < 2:
        raise Misuse(f"the hostfile {path} names {len(hosts)} ranks: it must name two or more")
    return hosts


def _content(path: str) -> bytes:
    """Return the content of a regular file. Raises OSError, Misuse.

    Pipes and other special files are refused, because MLX reads the hostfile again.
    """
    facts = Path(path).stat()
    if not stat.S_ISREG(facts.st_mode):
        raise Misuse(f"the hostfile {path} is not a regular file")
    if facts.st_size > _MOST_BYTES:
        raise Misuse(f"the hostfile {path} has more than {_MOST_BYTES} bytes")
    return Path(path).read_bytes()


def info_in(
    hostfile: str, rank: int, transport: str, control: str, environ: Mapping[str, str]
) -> RankInfo:
    """Return the `RankInfo` of a rank. Raises Misuse.

    control: HOST:PORT where rank 0 listens for the other ranks; "" for the default.
    environ: the environment, which contains the secret of the ranks.
    """
    hosts = hosts_of(hostfile)
    if rank >= len(hosts):
        raise Misuse(f"--rank is {rank}, but the hostfile has ranks 0 to {len(hosts) - 1}")
    known: tuple[Transport, ...] = get_args(Transport)
    found = next((backend for backend in known if backend == transport), None)
    if found is None:
        raise Misuse(f"--backend must be one of {', '.join(known)}, but it is {transport!r}")
    address = hosts[0][0], hosts[0][1] + _CONTROL_OFFSET
    if control:
        given = _address_in(control)
        if given is None:
            raise Misuse(f"--control {control!r} is not HOST:PORT")
        address = given
    elif address[1] >= 1 << 16:
        raise Misuse(
            f"rank 0 of the hostfile has port {hosts[0][1]}, and its control port, "
            f"{_CONTROL_OFFSET} higher, is above 65535: give a lower one, or --control HOST:PORT"
        )
    if _is_ip(address[0], "is_unspecified"):
        raise Misuse(
            f"rank 0 would listen for the other ranks on all interfaces, {address[0]}: name its"
            " address in their network, in the hostfile or with --control"
        )
    if found == "ring":
        _require_ring(hosts, address)
    local = address[0] == "localhost" or _is_ip(address[0], "is_loopback")
    if not environ.get(TOKEN) and not local:
        raise Misuse(
            f"ranks on several machines need a shared secret: set {TOKEN} to the same value for"
            " every rank"
        )
    if found == "jaccl" and not any(environ.get(name) for name in _DEVICES):
        raise Misuse(
            f"--backend jaccl needs {_DEVICES[0]}, the file of RDMA devices that"
            " mlx.distributed_config writes"
        )
    names, ports = tuple(host for host, _ in hosts), tuple(port for _, port in hosts)
    return RankInfo(rank, len(hosts), address, names, found, ports=ports)


def transport_environ(info: RankInfo, hostfile: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables by which mx.distributed finds the other ranks.

    These variables are the same as in MLX's `mlx/_distributed_utils/launch.py`, except those of
    `mpi`, which mpirun sets. Variables in `environ` keep their values.
    """
    host, port = hosts_of(hostfile)[0]
    defaults = {
        "jaccl": {"MLX_JACCL_COORDINATOR": f"{host}:{port}"},
        "nccl": {"NCCL_HOST_IP": host, "NCCL_PORT": str(port), "MLX_WORLD_SIZE": str(info.size)},
    }.get(info.transport, {})
    found = {name: environ.get(name) or value for name, value in defaults.items()}
    return found | {"MLX_HOSTFILE": hostfile, "MLX_RANK": str(info.rank)}


def _require_ring(hosts: Sequence[tuple[str, int]], control: tuple[str, int]) -> None:
    """Raise Misuse if the sockets of a ring cannot listen at these addresses.

    MLX's ring uses IPv4 only, and each socket needs a different address.
    """
    for rank, (host, port) in enumerate(hosts):
        if ":" in host:
            raise Misuse(
                f"rank {rank} has the address {host}, but MLX's ring uses IPv4 only: give an IPv4"
                " address or a name"
            )
        if (host, port) in hosts[:rank]:
            raise Misuse(f"the hostfile names {host}:{port} twice: each rank needs its own address")
        if (host, port) == control:
            raise Misuse(
                f"rank 0 would listen for the other ranks at {host}:{port}, the address of rank"
                f" {rank} in the ring: give another address with --control HOST:PORT"
            )


def _address_in(text: str) -> tuple[str, int] | None:
    """Split `HOST:PORT`; return None for any other text."""
    host, _, port = text.rpartition(":")
    try:
        host.encode("idna")  # as the resolver does
    except UnicodeError:
        return None
    valid = host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    return (host.strip("[]"), int(port)) if valid else None


def _is_ip(host: str, kind: str) -> bool:
    """Return whether a host is an IP address of a kind, such as `is_loopback`."""
    try:
        return bool(getattr(ipaddress.ip_address(host), kind))
    except ValueError:
        return False
