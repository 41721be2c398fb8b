"""Defines the planner's decisions and the events that it receives, as serialisable data.

A `StepPlan` contains all that the executor needs for one step. Sequences, cached prefixes and
batches are numbers, so a plan can be printed, replayed by a simulator, or sent to another rank.
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
    """Computes the bytes of KV that one sequence needs.

    per_token: bytes per token, in layers that store every token.
    fixed: bytes of recurrent state.
    windowed: (bytes per token, maximum tokens) of each layer with a sliding window.
    largest: bytes per token of the largest array that stores every token.
    state: bytes of the largest array of recurrent state.
    """

    per_token: int
    fixed: int
    windowed: tuple[tuple[int, int], ...] = ()
    largest: int = 0
    state: int = 0

    def of(self, tokens: int) -> int:
        """Return the bytes for `tokens` tokens, rounded up to the caches' growth step."""
        steps = -(-tokens // GROWTH_STEP) * GROWTH_STEP
        return self.snapshot(steps) + steps * self.per_token

    def copied(self, tokens: int) -> int:
        """Return the bytes for `tokens` tokens, and for a copy of the largest array.

        Arrays are copied, one at a time, when they grow and when sequences join or leave.
        """
        steps = -(-tokens // GROWTH_STEP) * GROWTH_STEP
        windows = [size * min(steps, most) for size, most in self.windowed]
        largest = max(self.largest * steps, self.state, *windows)
        return self.fixed + sum(windows) + steps * self.per_token + largest

    def snapshot(self, tokens: int) -> int:
        """Return the bytes of layers that cannot be truncated: recurrent state, sliding windows."""
        bounded: int = sum(size * min(tokens, most) for size, most in self.windowed)
        return self.fixed + bounded


@dataclass(slots=True)
class PassCost:
    """Computes the temporary bytes that a forward pass needs in addition to KV.

    The values are upper bounds at first. While no sequence is charged, measured costs may replace
    them (`become`). A pair is a token of the pass together with a token to which it attends.

    per_token: bytes per token of the pass, including padding.
    per_pair: bytes per pair, for attention scores; 0 if MLX has a fused kernel.
    per_row: bytes per row, whatever its number of tokens: recurrent states before the pass.
    per_seen: bytes per row and token to which it attends, in a pass of several tokens per row: keys
        and values that are computed from stored KV.
    step_seen: the same in a pass of one token per row.
    adapted: additional bytes per token for the adapters from which requests choose.
    per_mask: additional bytes per pair if the mask is an array. MLX's CUDA kernels need a number
        for every attention head.
    per_choice: bytes per token whose logits are computed.
    per_filter: additional bytes per such token if filters use the whole vocabulary.
    per_small: bytes per pair in a pass of several tokens without a fused kernel.
    most_small: upper bound of all bytes of `per_small` in one pass.
    """

    per_token: int = 0
    per_pair: float = 0.0
    per_choice: int = 0
    per_mask: float = 0.0
    per_filter: int = 0
    per_small: int = 0
    most_small: int = 0
    per_row: int = 0
    per_seen: float = 0.0
    step_seen: float = 0.0
    adapted: int = 0

    def of(self, tokens: int, seen: int, masked: int = 0, rows: int = 1) -> int:
        """Return the bytes of a pass.

        tokens: number of tokens of all rows together, including padding.
        seen: number of tokens of the longest sequence after the pass.
        masked: for how many of the `seen` tokens the mask is an array.
        """
        pairs = self.per_pair * seen + self.per_mask * min(masked, seen)
        small = min(tokens * seen * self.per_small, self.most_small) if tokens > 1 else 0
        attended = math.ceil((self.per_seen if tokens > rows else self.step_seen) * seen)
        each = tokens * (self.per_token + self.adapted + math.ceil(pairs))
        return each + small + rows * (self.per_row + attended)

    def become(self, other: PassCost) -> None:
        """Replace the values by those of another cost, for all users of this object."""
        for attribute in fields(self):
            setattr(self, attribute.name, getattr(other, attribute.name))

    def chosen(self, rows: int, seen: int, each: int = 1) -> int:
        """Return the bytes of a decode step that samples `each` tokens per row.

        seen: number of tokens of the longest row.
        """
        tokens = rows * each
        return self.of(tokens, seen, masked=seen, rows=rows) + tokens * self.per_choice


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits within which the planner decides, for one loaded model.

    cost: cost of one sequence's KV.
    slots: maximum number of admitted sequences.
    budget: bytes that the memory limit leaves after the weights.
    prompt_cache: how many of these bytes cached prefixes may use.
    max_entries: maximum number of cached prefixes; 0 means no limit.
    prefill_chunk: maximum number of tokens of one prefill pass.
    stall_ms: longest pause of running streams that a prefill pass may cause, in milliseconds.
    together: whether prompts of different lengths can share a prefill pass.
    trims: whether every layer's cache can be truncated to any length.
    draft_tokens: maximum number of draft tokens that a decode step checks for a sequence.
    draft: cost of the KV of a draft model or head, if there is one.
    draft_passes: cost of the passes of a draft model.
    """

    cost: CacheCost
    slots: int
    budget: int
    prompt_cache: int
    max_entries: int
    prefill_chunk: int
    stall_ms: float
    together: bool = True
    trims: bool = True
    passes: PassCost = field(default_factory=PassCost)
    draft_tokens: int = 0
    draft: CacheCost | None = None
    draft_passes: PassCost = field(default_factory=PassCost)


# Events: what the planner receives.


@dataclass(frozen=True, slots=True)
class Arrived:
    """A new sequence has arrived.

    key: the prompt in the form that caches compare.
    tokens: the prompt's token ids.
    limit: maximum number of tokens to generate.
    spans: (start, end) of each image and audio in the prompt; no KV is truncated inside a span.
    whole: whether a prefill pass must not end inside a span either.
    positions: lengths of prefixes that later prompts probably share.
    on_disk: number of the prompt's first tokens whose KV is in a file.
    width: maximum number of rows of KV that the sequence needs at the same time.
    fresh: whether the whole prompt must be computed, even if cached prefixes match.
    alone: whether the prefill cannot share a pass.
    joins: whether tokens are generated after the prompt.
    scores: whether continuations of the prompt are scored.
    encodes: bytes of the largest pass that encodes one of its images or audio.
    features: bytes per token of the features of its images and audio, which a pass must have.
    beside: bytes needed in addition to KV while the sequence is admitted.
    draft_tokens: maximum number of draft tokens that a decode step may check.
    """

    sequence: int
    key: PrefixKey
    tokens: Sequence[int]
    limit: int
    spans: tuple[tuple[int, int], ...] = ()
    whole: bool = False
    positions: tuple[int, ...] = ()
    on_disk: int = 0
    width: int = 1
    fresh: bool = False
    alone: bool = False
    joins: bool = True
    scores: bool = False
    encodes: int = 0
    features: int = 0
    beside: int = 0
    draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """The executor has started a sequence, with the KV of `reused` tokens."""

    sequence: int
    reused: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill pass has extended the KV of a sequence to `filled` tokens.

    snapshot: whether a snapshot was taken at this length.
    """

    sequence: int
    filled: int
    snapshot: bool = False


@dataclass(frozen=True, slots=True)
class Generated:
    """One or several steps have generated tokens, by the number of their sequence."""

    tokens: Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence has ended.

    failed: whether its KV may be damaged and must not be stored.
    """

    sequence: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """A sequence lost its KV to a failed allocation and has to be recomputed."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A cached prefix was stored.

    length: number of its tokens.
    after: those of its tokens that follow the prompt.
    nbytes: bytes of its KV and snapshots.
    positions: the checkpoint positions at which it can be used; None means any length.
    """

    entry: int
    length: int
    after: tuple[int, ...]
    nbytes: int
    positions: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class NotStored:
    """A cached prefix that a plan had ordered could not be stored."""

    entry: int


@dataclass(frozen=True, slots=True)
class PrefillTimed:
    """The device has computed a prefill pass.

    tokens: number of tokens, including padding.
    seconds: time that the device took.
    behind: number of tokens that were already in the longest KV.
    """

    tokens: int
    seconds: float
    behind: int = 0


@dataclass(frozen=True, slots=True)
class DecodeTimed:
    """The device has computed a decode step of all batches.

    seconds: time of the step.
    before: time of the steps between the previous event and this step.
    """

    seconds: float
    before: float = 0.0


@dataclass(frozen=True, slots=True)
class Masked:
    """A sequence's grammar has used processor time since the latest plan.

    postponed: whether there was no time for the latest mask, so that the sequence must be
        preempted.
    """

    sequence: int
    seconds: float
    postponed: bool = False


@dataclass(frozen=True, slots=True)
class Drafted:
    """A batch that the plan lists in `draft` has ended a decode step.

    rows: number of sequences.
    longest: number of tokens of the longest sequence.
    width: the planned maximum number of draft tokens per sequence; 0 for a step without any.
    proposed: number of draft tokens of all sequences together.
    right: number of accepted draft tokens of each sequence.
    seconds: time since the previous step if that step had the same sequences and nothing else ran;
        0 if unknown.
    behind: number of sequences without draft tokens because their drafter has not yet read all of
        their tokens.
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
    """The memory used or needed beside weights, sequences and cached prefixes has changed.

    nbytes: bytes of KV that is being written to disk, which will be free soon.
    features: bytes of cached features of images and audio, which can be evicted.
    files: bytes of KV that was read from disk for waiting sequences, until they start or a plan
        drops it.
    texts: bytes of working memory for which a batch of texts to embed waits; 0 if none waits.
    """

    nbytes: int
    features: int = 0
    files: int = 0
    texts: int = 0


@dataclass(frozen=True, slots=True)
class MemoryShort:
    """An allocation has failed, so every cached prefix must be dropped."""


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
    | Drafted
    | OtherBytes
    | MemoryShort
)


# Decisions: the parts of a plan.


@dataclass(frozen=True, slots=True)
class Source:
    """Describes where the KV of a sequence's first `length` tokens comes from.

    kind: `entry` for a cached prefix, `sequence` for another sequence, `disk` for a file.
    number: number of the cached prefix or of the other sequence.
    move: whether to move the KV of a cached prefix instead of copying it.
    """

    kind: Literal["entry", "sequence", "disk"]
    number: int
    length: int
    move: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Start a sequence.

    tokens: the prompt, and the tokens that were generated before a preemption.
    source: the source of its first KV; None means that the KV is empty.
    width: number of rows of KV that the sequence may use at the same time.
    snapshots: lengths of up to `source.length` tokens at which the sequence needs snapshots.
    """

    sequence: int
    tokens: Sequence[int]
    source: Source | None
    width: int = 1
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Leave:
    """Remove a sequence's KV.

    entry: number of the cached prefix in which to store the KV; None means to drop it.
    """

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

    snapshot: whether to take a snapshot at `end`.
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
    """Refuse a sequence, because it does not fit in memory.

    needed: bytes that the sequence needs, besides the weights.
    budget: bytes that the memory limit leaves after the weights.
    tokens: number of tokens of the sequence.
    writing: bytes that a disk has not finished writing, without which the sequence would fit.
    """

    sequence: int
    needed: int
    budget: int
    tokens: int
    writing: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step, with its fields in the order in which the executor carries them out.

    A step that only decodes may reuse the plan of the previous step, with the same number.

    features: maximum bytes of cached features of images and audio; None means no change.
    unread: waiting sequences for which KV was read from disk that is now dropped.
    evict: cached prefixes to drop.
    preempt: sequences that lose their KV and start again later.
    leave: sequences that have ended.
    decode: by batch, how many sequences decode.
    draft: by batch, the maximum number of draft tokens to check for each sequence. Batches that are
        not listed check none, and their steps are not reported as `Drafted`.
    rows: by batch, how many rows the KV may have, including unused rows that sequences can join.
        Batches that are not listed have a row for each sequence.
    prefill: the prefill passes, each with the chunks of the sequences that share the pass.
    ahead: whether these passes may start before the passes of the previous step have ended.
    score: the sequences whose continuations are scored.
    burst: whether completed prompts wait for other prompts, so their first tokens are not due yet.
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
    draft: Mapping[int, int] = field(default_factory=dict)
    rows: Mapping[int, int] = field(default_factory=dict)
    prefill: tuple[tuple[Prefill, ...], ...] = ()
    ahead: bool = False
    score: tuple[Score, ...] = ()
    burst: bool = False

    @property
    def only_decodes(self) -> bool:
        """Whether memory hardly changes: no sequence starts, ends or is prefilled."""
        return not (self.evict or self.preempt or self.leave or self.start or self.prefill)

    def __str__(self) -> str:
        """Describe the step, for the last log line of a process that hangs in it."""
        doing = []
        if self.decode:
            doing.append(f"decode step of {counted(sum(self.decode.values()), 'sequence')}")
        if self.prefill:
            tokens = sum(part.end - part.start for group in self.prefill for part in group)
            doing.append(f"prefill of {counted(tokens, 'token')}")
        if self.score:
            doing.append(f"scoring for {counted(len(self.score), 'sequence')}")
        return " and ".join(doing) or "start or end of a sequence"
