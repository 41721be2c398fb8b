"""The executor's data about sequences: one by one, in rows, and the failures that end them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.engine.caching import kv
from backend.engine.constraints.constraint import AnswerRule
from backend.engine.drafting.hidden_states import UnreadStates
from backend.engine.events import TokenLogprob
from backend.engine.executing.scoring import Scoring
from backend.engine.request import GenerationRequest

if TYPE_CHECKING:
    from backend.engine.disk_cache.prefix_folder import StoredPrefix
    from backend.engine.executing.choosing import Chosen
    from backend.engine.model import EngineModel
    from backend.engine.vision.media_plan import MediaPlan
    from backend.engine.vision.media_prefill import MediaPrefill

GRAMMAR = "grammar"  # an error of a grammar, which leaves the KV intact
_NO_ADAPTERS = nullcontext()  # one for all passes, because each step needs one


@dataclass(eq=False, slots=True)
class ExecutorSequence:
    """The executor's data about the sequence of one request.

    limit: maximum number of tokens to generate.
    adapter: the number of the adapter that the request has chosen; 0 means none.
    rows: the rows with the KV of the sequence; a `DecodeBatch` once it decodes.
    snapshots: by length, the snapshots of layers that cannot be truncated.
    tokens: the tokens to prefill: the prompt and, after a preemption, the answer so far.
    history: the tokens whose KV exists, in order.
    delivered: number of generated tokens that were read.
    finished: whether the answer is complete, so that it may be saved to disk.
    first: the first tokens of all sequences whose prompts the same pass completed.
    first_delivered: whether the first token was read, and passed to the grammar, before the
        sequence joined a batch.
    mask_seconds: processor time that the grammar used since the latest plan.
    postponed: whether the latest token was sampled without the grammar, for lack of time.
    states: the hidden states of the latest tokens, if a drafter reads them.
    """

    number: int
    request: GenerationRequest
    prompt: Sequence[int]
    limit: int
    constraint: AnswerRule | None = None
    scoring: Scoring | None = None
    media: MediaPlan | None = None
    stored: StoredPrefix | None = None
    adapter: int = 0
    rows: Rows | None = None
    media_prefill: MediaPrefill | None = None
    snapshots: dict[int, kv.Snapshot] = field(default_factory=dict)
    tokens: Sequence[int] = ()
    history: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    delivered: int = 0
    finished: bool = False
    first: Chosen | None = None
    first_delivered: bool = False
    mask_seconds: float = 0.0
    postponed: bool = False
    states: UnreadStates = field(default_factory=UnreadStates)

    @property
    def longest(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return len(self.prompt) + self.limit


@dataclass(frozen=True, slots=True)
class Failure:
    """An action that failed, with its name for the log.

    sequences: numbers of the sequences that lost their KV.
    """

    sequences: tuple[int, ...]
    where: str
    fault: Exception


def adapted(
    model: EngineModel, sequences: Iterable[ExecutorSequence]
) -> AbstractContextManager[None]:
    """Let each row of passes that are built in the block use the adapter of its sequence."""
    if model.adapters is None:
        return _NO_ADAPTERS
    return model.adapters.using([sequence.adapter for sequence in sequences])


class Rows:
    """Sequences whose KV is in the rows of one cache, in the same order."""

    def __init__(self, cache: kv.BatchCache, sequences: Sequence[ExecutorSequence]) -> None:
        self.cache = cache
        self.sequences = list(sequences)

    @classmethod
    def gathered(cls, sequences: Sequence[ExecutorSequence]) -> Rows:
        """Return rows of exactly these sequences, which leave their present rows.

        Raises what MLX raises.
        """
        homes = [sequence.rows for sequence in sequences if sequence.rows is not None]
        if len(homes[0].sequences) == len(sequences) == homes.count(homes[0]):
            return homes[0]
        gathered = cls(kv.BatchCache(), sequences)
        members = [
            home.cache.member(home.sequences.index(sequence))
            for sequence, home in zip(sequences, homes, strict=True)
        ]
        if len(sequences) == 1:
            members = [(homes[0].extract(sequences[0]), 0)]
        gathered.cache.join(members)
        del members  # the source arrays, which are freed as they are copied
        for sequence, home in zip(sequences, homes, strict=True):
            home.leave([sequence])
            sequence.rows = gathered
        start_copies([gathered, *{id(home): home for home in homes if home.sequences}.values()])
        return gathered

    def extract(self, sequence: ExecutorSequence) -> kv.RowCache:
        """Return a copy of a sequence's KV, of the tokens in `history`, not yet started."""
        return self.cache.extract(self.sequences.index(sequence), start=False)

    def take(self, sequence: ExecutorSequence) -> kv.RowCache:
        """Return the KV of a sequence that will leave, in buffers no larger than needed."""
        return self.extract(sequence)

    def settle(self) -> None:
        """Copy the sequences that remain after others have left, to free the larger arrays."""
        self.cache.settle()

    def leave(self, leaving: Sequence[ExecutorSequence]) -> None:
        gone = set(map(id, leaving))
        self.cache.leave([at for at, sequence in enumerate(self.sequences) if id(sequence) in gone])
        self.sequences = [sequence for sequence in self.sequences if id(sequence) not in gone]


def start_copies(changed: Sequence[Rows], copies: Sequence[kv.RowCache] = ()) -> None:
    """Settle rows and start to compute those that were copied. Raises what MLX raises.

    copies: other copies of the same KV.
    """
    for rows in changed:
        rows.settle()
    caches = [rows.cache for rows in changed if rows.cache.copied]
    kv.start_copies([*(cache.layers for cache in caches), *copies])
    for cache in caches:
        cache.copied = False
