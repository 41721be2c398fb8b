"""The part of a loaded model that the engine thread uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from backend.engine.blas_threads import BlasThreads
from backend.engine.drafting.draft_loading import Drafting
from backend.engine.engine_state import Gauges
from backend.engine.errors import EngineError
from backend.engine.planning.pace import Pace
from backend.engine.planning.plan import CacheCost, PassCost
from backend.engine.sampling.logits_head import LogitsHead
from backend.engine.token_text import TextStream

if TYPE_CHECKING:
    import mlx.core as mx

    from backend.engine.disk_cache.cache import DiskCache
    from backend.engine.experts.offload import CachedExperts
    from backend.engine.loading.row_adapters import RowAdapters
    from backend.engine.loading.stages import Stages
    from backend.engine.ranks.leader import Leader
    from backend.engine.served_model import ServedModel
    from backend.engine.vision.media_prefill import MediaReader


@dataclass(eq=False, slots=True)
class EngineModel:
    """A loaded model and the figures that scheduling depends on.

    head: computes the logits of selected tokens.
    vocabulary: number of logits.
    new_text: creates the text decoder of a sequence; its argument is whether the text continues the
        prompt's text.
    slots: maximum number of sequences that decode together.
    batches: whether the caches can be batched.
    trims: whether all caches can be truncated.
    together: whether prompts of different lengths can share a prefill pass.
    reads_whole: whether all tokens of a prompt attend to each other.
    memory_limit: bytes that MLX may use in all, including weights_bytes.
    experts: the cache of experts that stay in the checkpoint's files, if any do.
    media: encodes images and audio.
    stream_interval_ms: how long text may be collected before it is sent.
    blas: controls the number of OpenBLAS threads on a CPU.
    repetition_guard: tokens of repetition after which an answer ends; 0 means never.
    pace: how long prefill passes take. All schedulers of the model share it, so that the load's own
        prompts measure it; None means that each scheduler measures alone.
    leader: the connections to the other ranks, if ranks divide the model.
    adapters: the adapters of which each sequence may use one.
    broadcast: replaces tokens by those that rank 0 chose, inside the graph.
    later: work of the load that the first answers do not need; it runs while nothing else does.
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
    experts: CachedExperts | None = None
    reads_whole: bool = False
    disk: DiskCache | None = None
    batches: bool = True
    trims: bool = True
    together: bool = True
    media: MediaReader | None = None
    blas: BlasThreads | None = None
    repetition_guard: int = 0
    passes: PassCost = field(default_factory=PassCost)
    pace: Pace | None = None
    leader: Leader | None = None
    broadcast: Callable[[mx.array], mx.array] | None = None
    adapters: RowAdapters | None = None
    later: Stages[None] | None = None


class RowQueue(Protocol):
    """Runs requests that are not generations, one `step` at a time; see `EncodeQueue`."""

    short: bool

    @property
    def busy(self) -> bool: ...
    @property
    def budget(self) -> int: ...
    @property
    def needs(self) -> int: ...
    def submit(self, ticket: int, rows: Any, /) -> None: ...
    def cancel(self, ticket: int) -> None: ...
    def cancel_all(self, error: EngineError) -> None: ...
    def step(self, *, running: bool, budget: int | None = None) -> None: ...


NewQueue = Callable[
    [Callable[[int, Any], None], Callable[[str, BaseException], None], Gauges], RowQueue
]
Built: TypeAlias = "tuple[EngineModel | None, NewQueue | None, ServedModel]"
"""The result of a load: the model for generation or None, the queue for other requests or None, and
the served model."""
