"""Which part a process plays, by its command line and its environment.

    run.sh --addr HOST:PORT                               one process, which holds its models alone
    run.sh --addr HOST:PORT --ranks N                     N ranks on this machine
    run.sh --addr HOST:PORT --hostfile FILE               rank 0; the file has an address per rank
    run.sh --worker --rank R --hostfile FILE              another rank

`--backend`, `--rank` and the variables MLX_HOSTFILE, MLX_DISTRIBUTED_HOSTFILE, MLX_RANK and
MLX_DISTRIBUTED_BACKEND mean what they mean for `mlx.launch` and for LocalAI.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from backend.engine.ranks.place import TOKEN, Place, Transport

_CONTROL_OFFSET = 1000  # from rank 0's port in the ring to its port for the other ranks
_MOST_RANKS = 64
_POLICIES = ("restart", "exit")
_OPTIONS = ("--ranks", "--hostfile", "--rank", "--backend", "--control", "--rank-loss")


class Misuse(Exception):
    """The command line, the environment or the hostfile is wrong; `str()` is for the user."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start: `count` ranks on this machine, or the one rank of `place`.

    hostfile: an address of the ring per rank, where the user gives them. rest: the arguments that
    are rank 0's own. restarts: whether the ranks are started again after one is lost.
    """

    rest: tuple[str, ...]
    count: int = 0
    place: Place | None = None
    hostfile: str = ""
    restarts: bool = True


def plan_of(arguments: Sequence[str], environ: Mapping[str, str]) -> Plan | None:
    """The plan; None for a process that holds its models alone. Raises Misuse."""
    given, rest = _split(arguments)
    policy = given.get("--rank-loss", "restart")
    if policy not in _POLICIES:
        raise Misuse(f"--rank-loss must be restart or exit, but it is {policy!r}")
    worker = "--worker" in given
    hostfile = given.get("--hostfile") or environ.get("MLX_HOSTFILE") or ""
    hostfile = hostfile or environ.get("MLX_DISTRIBUTED_HOSTFILE", "")
    if "--ranks" in given:
        if worker or "--hostfile" in given:
            raise Misuse("--ranks starts ranks on this machine: leave out --worker and --hostfile")
        count = _number("--ranks", given["--ranks"], _MOST_RANKS)
        return Plan(tuple(rest), count, restarts=policy == "restart") if count > 1 else None
    if not worker and not hostfile:
        return None
    if not hostfile:
        raise Misuse("--worker needs --hostfile: a JSON list with the address of every rank")
    rank = _number("--rank", given.get("--rank") or environ.get("MLX_RANK") or "0", _MOST_RANKS)
    if worker and rank == 0:
        raise Misuse("--worker needs --rank with a number from 1: rank 0 is the one with --addr")
    place = _place(hostfile, rank, given, environ)
    return Plan(tuple(rest), place=place, hostfile=hostfile, restarts=policy == "restart")


def hosts_of(path: str) -> list[tuple[str, int]]:
    """The first address of each rank in a hostfile, in either form that mlx reads. Raises Misuse.

    The forms: `["10.0.0.1:5000", …]`, and a list of addresses for each rank.
    """
    try:
        entries: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise Misuse(f"the hostfile {path} cannot be read: {fault}") from None
    hosts = []
    for entry in entries if isinstance(entries, list) else ():
        first = entry[0] if isinstance(entry, list) and entry else entry
        host, colon, port = first.rpartition(":") if isinstance(first, str) else ("", "", "")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise Misuse(f"the hostfile {path} has the entry {entry!r}, which is not HOST:PORT")
        hosts.append((host.strip("[]"), int(port)))
    if len(hosts) < 2:
        raise Misuse(f"the hostfile {path} names {len(hosts)} ranks: it takes two or more")
    return hosts


def _place(hostfile: str, rank: int, given: Mapping[str, str], environ: Mapping[str, str]) -> Place:
    hosts = hosts_of(hostfile)
    if rank >= len(hosts):
        raise Misuse(f"--rank is {rank}, but the hostfile has ranks 0 to {len(hosts) - 1}")
    transport = given.get("--backend") or environ.get("MLX_DISTRIBUTED_BACKEND") or "ring"
    known: tuple[Transport, ...] = get_args(Transport)
    found = next((one for one in known if one == transport), None)
    if found is None:
        raise Misuse(f"--backend must be one of {', '.join(known)}, but it is {transport!r}")
    control = hosts[0][0], (hosts[0][1] + _CONTROL_OFFSET) % (1 << 16)
    if "--control" in given:
        host, colon, port = given["--control"].rpartition(":")
        if not colon or not port.isdigit() or int(port) >= 1 << 16:
            raise Misuse(f"--control {given['--control']!r} is not HOST:PORT")
        control = host.strip("[]"), int(port)
    if not environ.get(TOKEN) and not _is_loopback(control[0]):
        raise Misuse(
            f"ranks on several machines need a shared secret: set {TOKEN} to the same text for"
            " every rank"
        )
    names = tuple(host for host, _ in hosts)
    return Place(rank, len(hosts), control, names, found)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    given: dict[str, str] = {}
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if argument == "--worker":
            given[argument] = ""
        elif name == "--coordinator":
            raise Misuse("--coordinator is set by the variable MLX_JACCL_COORDINATOR")
        elif name in _OPTIONS:
            if not equals and not (value := next(rest, "")):
                raise Misuse(f"{name} needs a value")
            given[name] = value
        else:
            others.append(argument)
    return given, others


def _number(name: str, text: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > most:
        raise Misuse(f"{name} must be a number up to {most}, but it is {text!r}")
    return int(text)
