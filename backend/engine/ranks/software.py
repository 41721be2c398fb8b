"""Compares the software of all ranks before MLX forms the group.

Ranks with different versions of MLX may wait for each other for ever, and another version of this
backend may not understand the request to load.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from backend.engine.errors import ModelRejected
from backend.engine.ranks.place import Place
from common.version import VERSION


def versions() -> dict[str, str]:
    """Return the versions of packages in this process, by package."""
    return {"mlx-backend": VERSION, "mlx": version("mlx"), "mlx-lm": version("mlx-lm")}


def require_same(place: Place, others: Mapping[int, Mapping[str, str]]) -> None:
    """Raise ModelRejected for the first rank that has another version than this process.

    others: the result of `versions` on other ranks, by rank.
    """
    own = versions()
    for rank, its in sorted(others.items()):
        for package, here in own.items():
            if (there := its.get(package)) != here:
                raise ModelRejected(
                    f"no model can be loaded: {place.name(rank)} has {package} {there} and rank 0"
                    f" has {here}; install the same version on every rank"
                )
