"""What a host asks for when it loads a model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backend.engine.cache_kind import CacheKind
    from backend.engine.loading.adapters import Adapter, AdapterRequest
    from backend.engine.loading.checkpoint import Checkpoint
    from backend.engine.media.limits import MediaLimits
    from backend.engine.ranks.rank_load import RankLoad
    from backend.engine.settings import Settings


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What LoadModel asked for, typed (`backend.rpc.load_options` builds it).

    model, model_file, model_path: the request's three references to the model, verbatim
        (`backend.engine.loading.model_reference` resolves them).
    context_size: tokens of prompt plus output; 0 means the model's own maximum.
    cache_type_key, cache_type_value: llama.cpp's names for the form of the KV cache.
    adapters: in the order in which they were named; they add up.
    draft_model: a smaller model that guesses ahead, as the host names it; empty means none.
    embeddings, reranking: what the model must be able to answer.
    most_images, most_audios, most_videos: of one request; 0: the default.
    settings: our settings by name (`backend.engine.settings`), already typed and checked.
    """

    model: str
    model_file: str = ""
    model_path: str = ""
    context_size: int = 0
    dtype: str = ""
    trust_remote_code: bool = False
    cache_type_key: str = ""
    cache_type_value: str = ""
    adapters: tuple[AdapterRequest, ...] = ()
    draft_model: str = ""
    embeddings: bool = False
    reranking: bool = False
    most_images: int = 0
    most_audios: int = 0
    most_videos: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load request whose every part has passed the checks that need no weights.

    epoch: the number of the load. started: when the checkpoint had been found, by the clock of
    time.perf_counter. ranks: those that divide the model, where there are any.
    """

    request: LoadRequest
    epoch: int
    settings: Settings
    checkpoint: Checkpoint
    cache_kind: CacheKind
    adapters: tuple[Adapter, ...]
    draft: Checkpoint | None
    media_limits: MediaLimits
    started: float = field(default_factory=time.perf_counter)
    ranks: RankLoad | None = None
