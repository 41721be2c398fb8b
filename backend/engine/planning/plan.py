"""The planner's decisions and the events it receives: frozen, serialisable data without MLX.

A `StepPlan` is all that the executor needs for one step. It refers to sequences, stored entries and
batches by number, so it can be printed, replayed by a simulator, or sent to another rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from backend.engine.heartbeat import counted
from backend.engine.planning.prefix_index import PrefixKey

GROWTH_STEP = 256  # tokens by which mlx-lm's KV caches grow (`KVCache.step`)


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Bytes of KV that one sequence needs.

    per_token: bytes per token, in layers that store every token.
    fixed: bytes of recurrent state.
    windowed: (bytes per token, maximum tokens) of layers with a sliding window.
    """

    per_token: int
    fixed: int
    windowed: tuple[tuple[int, int], ...] = ()

    def of(self, tokens: int) -> int:
        """Return the bytes for `tokens` tokens, rounded up to the caches' growth step."""
        steps = -(-tokens // GROWTH_STEP) * GROWTH_STEP
        return self.snapshot(steps) + steps * self.per_token

    def snapshot(self, tokens: int) -> int:
        """Bytes of the layers that cannot be cut back: recurrent state and sliding windows."""
        bounded: int = sum(size * min(tokens, most) for size, most in self.windowed)
        return self.fixed + bounded


@dataclass(slots=True)
class PassCost:
    """Temporary bytes that a forward pass needs, in addition to KV, until it is done.

    An upper bound may be replaced by what was measured, while no sequence is charged (`become`).

    per_token: for every token in it, including padding.
    per_pair: for every token and each token that it attends to: attention scores, if MLX has no
        fused kernel.
    per_mask: for every such pair, in addition, if the mask is an array: MLX's CUDA kernels need it
        as a number for every attention head.
    per_choice: for every token whose logits are computed.
    per_filter: in addition, if filters look at the whole vocabulary.
    per_small: for every pair, if the pass has several tokens, but at most most_small in all:
        attention by plain operations (`small_attention`).
    """

    per_token: int = 0
    per_pair: float = 0.0
    per_choice: int = 0
    per_mask: float = 0.0
    per_filter: int = 0
    per_small: int = 0
    most_small: int = 0

    def of(self, tokens: int, seen: int, masked: int = 0) -> int:
        """Bytes of a pass over `tokens` tokens; its sequences are then up to `seen` tokens long.

        masked: for how many of the `seen` tokens the mask is an array.
        """
        pairs = self.per_pair * seen + self.per_mask * min(masked, seen)
        small = min(tokens * seen * self.per_small, self.most_small) if tokens > 1 else 0
        return tokens * (self.per_token + math.ceil(pairs)) + small

    def become(self, other: PassCost) -> None:
        """Take the values of another cost, wherever this one is used."""
        for attribute in fields(self):
            setattr(self, attribute.name, getattr(other, attribute.name))

    def chosen(self, rows: int, seen: int) -> int:
        """Return the bytes of a decode step of `rows` rows, whose lengths may differ."""
        return self.of(rows, seen, masked=seen) + rows * self.per_choice


@dataclass(frozen=True, slots=True)
class Limits:
    """What a loaded model allows the planner.

    cost: of one sequence's KV.
    passes: temporary memory of forward passes.
    slots: maximum number of admitted sequences.
    room: bytes left after the weights.
    prompt_cache: bytes of these for stored entries.
    max_entries: maximum number of stored entries; 0 means no limit.
    prefill_chunk: maximum number of tokens of one prefill pass.
    stall_ms: longest pause of running streams that a prefill pass may cause.
    together: whether prompts of different lengths can share a prefill pass.
    trims: whether every layer's cache can be truncated to any length.
    guesses: maximum number of guesses that a decode step checks for a sequence.
    draft: cost of the KV of a draft model, in addition to the model's own.
    """

    cost: CacheCost
    slots: int
    room: int
    prompt_cache: int
    max_entries: int
    prefill_chunk: int
    stall_ms: float
    together: bool = True
    trims: bool = True
    passes: PassCost = field(default_factory=PassCost)
    guesses: int = 0
    draft: CacheCost | None = None


# Events: what the planner learns.


@dataclass(frozen=True, slots=True)
class Arrived:
    """A new sequence.

    key: the prompt in the form that caches compare.
    tokens: the prompt's token ids.
    limit: maximum number of tokens to generate.
    spans: ranges of the prompt inside which no cache may be cut (images, sounds).
    whole: whether a prefill pass must not cut them either.
    places: lengths of prefixes that later prompts are likely to share.
    on_disk: how many tokens of the prompt a file holds.
    width: rows of KV that it may need at once.
    fresh: the whole prompt must be computed, whatever is stored.
    alone: its prefill cannot share a pass.
    joins: whether tokens are generated after the prompt.
    scores: whether continuations are scored instead.
    keep: whether its KV is worth storing when it ends.
    encodes: bytes that encoding the largest of its images and sounds takes.
    beside: bytes that it needs in addition to KV for as long as it is admitted.
    guesses: maximum number of guesses that a decode step may check for it.
    """

    sequence: int
    key: PrefixKey
    tokens: Sequence[int]
    limit: int
    spans: tuple[tuple[int, int], ...] = ()
    whole: bool = False
    places: tuple[int, ...] = ()
    on_disk: int = 0
    width: int = 1
    fresh: bool = False
    alone: bool = False
    joins: bool = True
    scores: bool = False
    keep: bool = True
    encodes: int = 0
    beside: int = 0
    guesses: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """The executor has given a sequence its KV, which holds its first `reused` tokens."""

    sequence: int
    reused: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The KV of a sequence holds `filled` tokens. snapshot: a snapshot of that length was taken."""

    sequence: int
    filled: int
    snapshot: bool = False


@dataclass(frozen=True, slots=True)
class Generated:
    """The tokens that one or several steps have delivered, by the number of their sequence."""

    tokens: Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence has ended. failed: its KV may be damaged and must not be stored."""

    sequence: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """A sequence lost its KV to a failed allocation and has to be recomputed."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry was stored.

    entry: its number.
    length: its tokens.
    after: those of them that follow the prompt.
    nbytes: bytes that it holds.
    places: lengths at which it can be used; None means any.
    """

    entry: int
    length: int
    after: tuple[int, ...]
    nbytes: int
    places: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class NotStored:
    """An entry of the plan could not be stored."""

    entry: int


@dataclass(frozen=True, slots=True)
class PrefillTimed:
    """Seconds that the device took for a prefill pass over this many tokens, including padding.

    behind: tokens that were computed before them, in the longest prompt.
    """

    tokens: int
    seconds: float
    behind: int = 0


@dataclass(frozen=True, slots=True)
class DecodeTimed:
    """Seconds that the device took for a decode step of all batches."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Masked:
    """Seconds of processor time that a sequence's grammar took since the latest plan.

    postponed: there was no time for its latest mask, so the sequence must be preempted.
    """

    sequence: int
    seconds: float
    postponed: bool = False


@dataclass(frozen=True, slots=True)
class Guessed:
    """A decode step of a batch that the plan's `guess` lists has ended.

    rows: number of sequences.
    longest: tokens of the longest.
    width: as planned.
    proposed: guesses of all sequences.
    right: of each sequence, the guesses that were right.
    seconds: since the previous step, if that had the same sequences and nothing else ran; 0 if
        unknown.
    behind: sequences without guesses because their guesser has yet to catch up.
    """

    rows: int
    longest: int
    width: int
    proposed: int
    right: tuple[int, ...]
    seconds: float
    behind: int = 0


@dataclass(frozen=True, slots=True)
class OtherBytes:
    """Bytes besides the weights that neither sequences nor stored entries hold.

    nbytes: memory that will be free soon: KV on its way to the disk.
    features: features of earlier images and sounds, which are evicted when sequences need the
        memory.
    files: KV that was read from disk for sequences that wait; it is free when they start, or when a
        plan gives it up.
    texts: the working memory for which a batch of texts to embed waits; 0 if none waits.
    """

    nbytes: int
    features: int = 0
    files: int = 0
    texts: int = 0


@dataclass(frozen=True, slots=True)
class MemoryShort:
    """An allocation failed: every stored entry must be dropped."""


PlannerEvent = (
    Arrived
    | Started
    | Prefilled
    | Generated
    | Ended
    | Lost
    | Stored
    | NotStored
    | PrefillTimed
    | DecodeTimed
    | Masked
    | Guessed
    | OtherBytes
    | MemoryShort
)


# Decisions: what a plan consists of.


@dataclass(frozen=True, slots=True)
class Source:
    """Where a sequence's first `length` tokens come from: an entry, another sequence, or disk.

    number: of the entry or sequence.
    move: take over the entry's KV instead of copying it.
    """

    kind: Literal["entry", "sequence", "disk"]
    number: int
    length: int
    move: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Give a sequence its KV.

    tokens: its prompt, and what it had generated before a preemption.
    width: rows of KV that it may use at once.
    snapshots: the lengths within the source at which it has snapshots, copied from the source or
        taken now.
    """

    sequence: int
    tokens: Sequence[int]
    source: Source | None
    width: int = 1
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Leave:
    """Remove a sequence's KV. entry: the number under which to store it; None means drop it."""

    sequence: int
    entry: int | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """Move a prefilled sequence into a batch."""

    sequence: int
    batch: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the KV of a sequence's tokens from `start` to `end`.

    snapshot: copy the layers that cannot be truncated when `end` is reached.
    """

    sequence: int
    start: int
    end: int
    snapshot: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """Score the next tokens of a sequence's continuations, at most `budget` of them."""

    sequence: int
    budget: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A sequence that does not fit into memory.

    needed, room: bytes besides the weights.
    writing: bytes that a disk has not finished writing, without which it would fit.
    """

    sequence: int
    needed: int
    room: int
    tokens: int
    writing: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, in the order in which the executor carries it out.

    A step that only decodes may have the plan of the one before it, number included.

    features: bytes that features of images and sounds may keep; None means no change.
    unread: waiting sequences that lose the KV that was read from disk for them.
    preempt: sequences that lose their KV and start again later.
    prefill: the passes, each with the sequences computed in it.
    decode: how many sequences decode in each batch, by its number.
    guess: by batch, the maximum number of guesses to check for each sequence; batches not listed
        check none, and their steps are not reported as `Guessed`.
    rows: by batch, how many rows its KV may have, with unused ones into which sequences can join;
        exactly those of its sequences for batches not listed.
    ahead: whether the passes may start before those of the step before have ended.
    """

    number: int
    features: int | None = None
    unread: tuple[int, ...] = ()
    evict: tuple[int, ...] = ()
    preempt: tuple[Leave, ...] = ()
    leave: tuple[Leave, ...] = ()
    refuse: tuple[Refusal, ...] = ()
    start: tuple[Start, ...] = ()
    join: tuple[Join, ...] = ()
    decode: Mapping[int, int] = field(default_factory=dict)
    guess: Mapping[int, int] = field(default_factory=dict)
    rows: Mapping[int, int] = field(default_factory=dict)
    prefill: tuple[tuple[Prefill, ...], ...] = ()
    ahead: bool = False
    score: tuple[Score, ...] = ()

    @property
    def only_decodes(self) -> bool:
        """Whether memory hardly changes: no sequence starts, ends or is prefilled."""
        return not (self.evict or self.preempt or self.leave or self.start or self.prefill)

    def __str__(self) -> str:
        """What the step does, for the last log line of a process that hangs in the step."""
        doing = []
        if self.decode:
            doing.append(f"decode step of {counted(sum(self.decode.values()), 'sequence')}")
        if self.prefill:
            tokens = sum(part.end - part.start for group in self.prefill for part in group)
            doing.append(f"prefill of {counted(tokens, 'token')}")
        if self.score:
            doing.append(f"scoring for {counted(len(self.score), 'sequence')}")
        return " and ".join(doing) or "start or end of a sequence"
