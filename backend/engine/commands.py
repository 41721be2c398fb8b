"""The commands that the engine thread accepts."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING

from backend.engine.embedding.encoding import Piece
from backend.engine.request import GenerationRequest
from backend.engine.speech.transcript import Speech

if TYPE_CHECKING:
    from backend.engine.constraints.constraint import AnswerRule
    from backend.engine.disk_cache.prefix_folder import StoredPrefix
    from backend.engine.executing.score_plan import ScorePlan
    from backend.engine.loading.stages import Stages, StageThread
    from backend.engine.model import Built
    from backend.engine.planning.prefix_index import PrefixKey
    from backend.engine.served_model import ServedModel
    from backend.engine.vision.media_plan import MediaPlan


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a generation.

    epoch: the number of the load whose model must serve the request.
    limit: maximum number of tokens to generate.
    stored: a prefix of the prompt that was read from disk.
    plan: for a Score, the continuations to score; nothing is generated then.
    media: the images and audio in the prompt.
    key: the prompt in the form that caches compare, built in advance on a prompt thread.
    positions: the checkpoint positions: lengths of prefixes that later prompts probably share.
    adapter: the number of the adapter that the request has chosen; 0 means none.
    """

    epoch: int
    ticket: int
    request: GenerationRequest
    prompt: list[int]
    limit: int
    constraint: AnswerRule | None = None
    stored: StoredPrefix | None = None
    plan: ScorePlan | None = None
    media: MediaPlan | None = None
    key: PrefixKey | None = None
    positions: tuple[int, ...] = ()
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode rows (Embedding, Rerank, TokenClassify), or transcribe a recording."""

    epoch: int
    ticket: int
    pieces: list[Piece] | Speech


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop a generation or an encoding, queued or running."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Load:
    """Run the next stage of a load; after the last stage, a new model replaces the current one.

    abandoned: set when the caller no longer waits, which ends the load.
    stages: their result is a new model, or the current model with other adapters.
    done: the name of the thread for the next stage or, after the last stage, the served model.
    """

    stages: Stages[Built | ServedModel]
    abandoned: Event
    done: Future[StageThread | ServedModel] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Free:
    """End all generations and drop the model."""

    done: Future[None] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Stop:
    """End all generations and the thread."""


@dataclass(frozen=True, slots=True)
class MeasureMemory:
    """Measure memory use, in bytes by purpose, between two steps."""

    done: Future[dict[str, int]] = field(default_factory=Future)


Command = Submit | Encode | Cancel | Load | Free | MeasureMemory | Stop
