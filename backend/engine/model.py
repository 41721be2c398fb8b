"""The half of a loaded model that belongs to the engine thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from backend.engine.blas_threads import BlasThreads
from backend.engine.drafting.draft_loading import Drafting
from backend.engine.logits_head import LogitsHead
from backend.engine.plan import CacheCost, PassCost
from backend.engine.token_text import TextStream

if TYPE_CHECKING:
    import mlx.core as mx

    from backend.engine.disk_cache.cache import DiskCache
    from backend.engine.embedding.encode_queue import NewEncoder
    from backend.engine.ranks.leader import Leader
    from backend.engine.served_model import ServedModel
    from backend.engine.vision.media_prefill import MediaReader


@dataclass(eq=False, slots=True)
class EngineModel:
    """A loaded model and the figures that scheduling depends on.

    head: computes the logits of chosen tokens alone. vocabulary: width of the logits. new_text: a
    sequence's decoder; the argument says whether its text continues the prompt's. slots:
    sequences that may decode together. batches: whether its caches can hold several sequences.
    trims: whether they can all be cut back. together: whether prompts of different lengths can
    share a prefill pass. memory_limit: bytes that MLX may use in all; weights_bytes of them are
    taken by the model itself. drafting: how it guesses ahead while one sequence decodes. disk:
    prompt caches that survive the process. media: what reads images and sounds, where the model
    takes any. stream_interval_ms: for which text may wait for more. blas: the threads of matrix
    products on a CPU. repetition_guard: tokens of repetition after which an answer ends; 0: never.
    leader: the other ranks, where the model is divided. spread: gives all ranks the tokens of rank
    0, inside the graph.
    """

    model: Any
    head: LogitsHead
    vocabulary: int
    end_tokens: frozenset[int]
    new_text: Callable[[bool], TextStream]
    cost: CacheCost
    slots: int
    weights_bytes: int
    memory_limit: int
    prompt_cache_bytes: int
    max_cache_entries: int
    prefill_chunk: int
    stall_ms: int
    stream_interval_ms: int = 0
    drafting: Drafting | None = None
    disk: DiskCache | None = None
    batches: bool = True
    trims: bool = True
    together: bool = True
    media: MediaReader | None = None
    blas: BlasThreads | None = None
    repetition_guard: int = 0
    passes: PassCost = field(default_factory=PassCost)
    leader: Leader | None = None
    spread: Callable[[mx.array], mx.array] | None = None


Built: TypeAlias = "tuple[EngineModel | None, NewEncoder | None, ServedModel]"
"""What a load ends with: what generates, what encodes, or both; and the other half of the model."""
