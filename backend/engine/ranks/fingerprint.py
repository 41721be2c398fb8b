"""Compares what must be the same on every rank: software, checkpoint, and the type of the weights.

Ranks that differ in one of these would not fail, but answer wrongly, or wait for each other for
ever. A rank with another version of this backend may not even be able to read the messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from backend.engine.disk_cache.identity import file_digests, version
from backend.engine.errors import ModelRejected
from backend.engine.loading.shards import PATTERN
from backend.engine.ranks.rank_info import RankInfo, Value
from common.version import VERSION

if TYPE_CHECKING:
    from backend.engine.loading.checkpoint import Checkpoint


def versions() -> dict[str, str]:
    """Return the versions of the packages that must be the same on every rank, by package."""
    return {"mlx-backend": VERSION, **{name: version(name) for name in ("mlx", "mlx-lm")}}


def require_same(info: RankInfo, others: Mapping[int, Mapping[str, str]]) -> None:
    """Raise ModelRejected for the first rank whose versions differ from those of this process."""
    own = versions()
    for rank, other in sorted(others.items()):
        for package, here in own.items():
            if (there := other.get(package)) != here:
                raise ModelRejected(
                    f"no model can be loaded: {info.name(rank)} has {package} {there} and rank 0"
                    f" has {here}; install the same version on every rank"
                )


def fingerprint(checkpoint: Checkpoint, dtype: str) -> Value:
    """Return this rank's report of its checkpoint and type, for `require_alike`.

    dtype: the type to which this rank casts the weights; "" for the checkpoint's own.
    """
    needed = {"config.json", checkpoint.config.get("model_file")}
    files = {
        name: digest
        for name, digest in file_digests(checkpoint.path).items()
        if name in needed or fnmatch(name, PATTERN)
    }
    return {"files": files, "dtype": dtype}


def require_alike(name: str, info: RankInfo, reports: Sequence[Value]) -> None:
    """Raise ModelRejected for the first rank whose report differs from the report of rank 0."""
    first = reports[0]
    for rank, other in enumerate(reports[1:], 1):
        who = info.name(rank)
        for file in sorted(first["files"].keys() | other["files"].keys()):
            if first["files"].get(file) != other["files"].get(file):
                raise ModelRejected.because(
                    name,
                    f"its {file} on {who} differs from that of rank 0: copy the same checkpoint to"
                    " every rank",
                )
        if other["dtype"] != first["dtype"]:
            raise ModelRejected.because(
                name,
                f"{who} would compute in {_type(other)} and rank 0 in {_type(first)}: set the"
                " option dtype",
            )


def _type(report: Value) -> str:
    return report["dtype"] or "the checkpoint's own type"
