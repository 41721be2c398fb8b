"""The request to load a model, before and after it is checked."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backend.engine.caching.cache_kind import CacheKind
    from backend.engine.loading.adapters import Adapter, AdapterRequest
    from backend.engine.loading.checkpoint import Checkpoint
    from backend.engine.media.limits import MediaLimits
    from backend.engine.ranks.rank_load import RankLoad
    from backend.engine.settings import Settings


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A LoadModel request with typed fields (built by `backend.rpc.load_options`).

    model, model_file, model_path: the request's three references to the model, verbatim
        (`backend.engine.loading.model_reference` resolves them).
    context_size: tokens of prompt and output together; 0 means as many as fit in memory for one
        request.
    cache_type_key, cache_type_value: llama.cpp's names for the kind of KV cache.
    adapters: adapters that are always applied, in the order of the request; their effects add up.
    choices: by name, adapters of which a request may choose one.
    draft_model: the host's reference to a draft model; empty means none.
    embeddings, reranking: whether the model must support these requests.
    most_images, most_audios, most_videos: maximum per request; 0 means the default.
    settings: the values of options by name (`backend.engine.settings`), already typed and checked.
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
    choices: tuple[tuple[str, AdapterRequest], ...] = ()
    draft_model: str = ""
    embeddings: bool = False
    reranking: bool = False
    most_images: int = 0
    most_audios: int = 0
    most_videos: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def without_choices(self) -> LoadRequest:
        """Return the request without the option `adapters`, which a loaded model can change."""
        settings = {name: value for name, value in self.settings.items() if name != "adapters"}
        return replace(self, choices=(), settings=settings)


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load request after all checks that do not need the weights.

    epoch: the number of the load.
    started: time.perf_counter() when the checkpoint was found.
    ranks: the ranks that divide the model, if any.
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
    ranks: RankLoad | None = None
    head: Checkpoint | None = None
