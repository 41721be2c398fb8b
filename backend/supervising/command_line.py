"""Reads from the command line and the environment which ranks to start.

    run.sh --addr HOST:PORT                               one process, without other ranks
    run.sh --addr HOST:PORT --ranks N                     N ranks on this machine
    run.sh --addr HOST:PORT --hostfile FILE               rank 0; the file has an address per rank
    run.sh --worker --rank R --hostfile FILE              another rank

`--backend`, `--rank` and the variables MLX_HOSTFILE, MLX_DISTRIBUTED_HOSTFILE, MLX_RANK and
MLX_DISTRIBUTED_BACKEND have the same meaning as for `mlx.launch` and LocalAI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backend.engine.ranks.rank_info import Misuse, RankInfo, info_in

_MOST_RANKS = 64
_POLICIES = ("restart", "exit")
_OPTIONS = ("--ranks", "--hostfile", "--rank", "--backend", "--control", "--rank-loss")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start: `count` ranks on this machine, or the single rank of `info` in a hostfile.

    rest: the other arguments, which are passed to rank 0.
    restarts: whether the ranks are restarted after a rank is lost.
    """

    rest: tuple[str, ...]
    count: int = 0
    info: RankInfo | None = None
    hostfile: str = ""
    restarts: bool = True


def plan_of(arguments: Sequence[str], environ: Mapping[str, str]) -> Plan | None:
    """Return what to start; None for a single process without ranks. Raises Misuse."""
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
        _refuse_without_hostfile(given)
        count = _number("--ranks", given["--ranks"], _MOST_RANKS)
        return Plan(tuple(rest), count, restarts=policy == "restart") if count > 1 else None
    if not worker and not hostfile:
        _refuse_without_hostfile(given)
        if environ.get("MLX_RANK", "0") != "0":
            raise Misuse(
                f"MLX_RANK is {environ['MLX_RANK']}, but no hostfile says where the ranks are: add"
                " --hostfile, or unset MLX_RANK"
            )
        if "--rank-loss" in given:
            raise Misuse("--rank-loss has no effect on a process without other ranks: leave it out")
        return None
    if not hostfile:
        raise Misuse("--worker needs --hostfile: a JSON list with the address of every rank")
    rank = _number("--rank", given.get("--rank") or environ.get("MLX_RANK") or "0", _MOST_RANKS)
    if worker and rank == 0:
        raise Misuse("--worker needs --rank with a number from 1: rank 0 is the one with --addr")
    transport = given.get("--backend") or environ.get("MLX_DISTRIBUTED_BACKEND") or "ring"
    info = info_in(hostfile, rank, transport, given.get("--control", ""), environ)
    return Plan(tuple(rest), info=info, hostfile=hostfile, restarts=policy == "restart")


def _refuse_without_hostfile(given: Mapping[str, str]) -> None:
    for name in ("--rank", "--backend", "--control"):
        if name in given:
            raise Misuse(f"{name} is for ranks of a hostfile: add --hostfile, or leave it out")


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
