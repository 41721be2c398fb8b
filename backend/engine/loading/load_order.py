"""A load request after all checks that do not need the weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backend.engine.caching.cache_kind import CacheKind
    from backend.engine.load_request import LoadRequest
    from backend.engine.loading.adapters import Adapter
    from backend.engine.loading.checkpoint import Checkpoint
    from backend.engine.media.limits import MediaLimits
    from backend.engine.ranks.leader import Leader
    from backend.engine.settings import Settings


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What to load, and how.

    epoch: the number of the load.
    started: time.perf_counter() when the checkpoint was found.
    ranks: the connections to the other ranks, if ranks divide the model.
    head: the model's prediction head, if it is in a folder beside the checkpoint.
    """

    request: LoadRequest
    epoch: int
    settings: Settings
    checkpoint: Checkpoint
    cache_kind: CacheKind
    adapters: tuple[Adapter, ...]
    draft: Checkpoint | None
    media_limits: MediaLimits
    choices: Mapping[str, Adapter] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    ranks: Leader | None = None
    head: Checkpoint | None = None
