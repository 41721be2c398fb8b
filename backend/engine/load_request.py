"""The request to load a model, before it is checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """An adapter that the load request names.

    scale: a factor above 0 for the scale that the adapter's files state.
    """

    reference: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A LoadModel request with typed fields (built by `backend.rpc.load_options`).

    model, model_file, model_path: the request's three references to the model, verbatim
        (`backend.engine.loading.model_reference` resolves them).
    context_size: tokens of prompt and output together; 0 means as many as fit in memory.
    cache_type_key, cache_type_value: llama.cpp's names for the kind of KV cache.
    adapters: adapters that are always applied, in the order of the request; their effects add up.
    choices: by name, adapters of which a request may choose one.
    draft_model: the host's reference to a draft model; empty means none.
    embeddings, reranking: whether the model must support these requests.
    most_images, most_audios, most_videos: maximum per request; 0 means the default.
    settings: the values of options by name (`backend.engine.settings`), typed and checked.
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
