"""What the engine tells of itself and of its model, to whoever asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from backend.engine.embedding.kind import ModelKind
from backend.engine.request import Extras
from backend.engine.token_text import TextStream
from common.chat_format import ChatFormat


class EngineState(Enum):
    """What the one model slot of this process is doing."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    GENERATING = "generating"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State plus memory figures in bytes, as MLX reports them."""

    state: EngineState
    total_bytes: int
    breakdown: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Totals since the process started, and the speed of the latest decode step."""

    running: int
    queued: int
    tokens_generated: int
    prompt_tokens_processed: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of the loaded model.

    chat_format: how its answers are read. call_format: how they are where tools are offered, if
    those are read in another way.
    vocabulary_size: width of its logits. token_bytes: what a token writes. new_text: a decoder of
    tokens; the argument says whether its text goes on from an earlier one. kind: what it answers.
    media: which of image and audio it takes; media_marker: where they go in a raw prompt.
    """

    name: str
    model_type: str
    context_size: int
    chat_template: str | None
    chat_format: ChatFormat
    rendered_template: str
    vocabulary_size: int
    token_bytes: Callable[[int], bytes]
    new_text: Callable[[bool], TextStream]
    defaults: Extras = field(default_factory=Extras)
    kind: ModelKind = ModelKind.TEXT
    media: frozenset[str] = frozenset()
    media_marker: str = ""
    call_format: ChatFormat | None = None

    def format_of(self, *, tools: bool) -> ChatFormat:
        """How an answer is read, with tools offered or without."""
        return self.call_format or self.chat_format if tools else self.chat_format
