"""The scheduling of mlx_lm.server, as in mlx-lm 0.32.2's `server.py` and `generate.py`.

Up to 8 prompts are prefilled side by side, up to 2048 tokens of each per pass, padded to the
longest; between two such passes, up to 32 sequences decode one token. Memory is not considered. New
requests are accepted every half second. At most 10 prompts are stored. By default their size is not
limited; here the option --prompt-cache-bytes limits it to the memory that the weights leave.

The simulation favours it: padding of prompts is not charged, clients that disconnect are removed
from the queue immediately, and it does not crash when memory is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from backend.engine.planning.plan import (
    Arrived,
    Ended,
    Generated,
    Join,
    Leave,
    Limits,
    PlannerEvent,
    Prefill,
    Prefilled,
    Source,
    Start,
    StepPlan,
    Stored,
)
from backend.engine.planning.prefix_index import PrefixKey
from bench.simulation.device import ServerPlan

# Defaults of mlx_lm.server, with the options that set them.
_PROMPTS = 8  # --prompt-concurrency
_SEQUENCES = 32  # --decode-concurrency
_STEP = 2048  # --prefill-step-size
_ENTRIES = 10  # --prompt-cache-size
_ACCEPTS_EVERY = 0.5  # seconds; TimeBudget in its source
_BATCH = 1

Origin = Literal["assistant", "user", "system"]
_ORDER: tuple[Origin, ...] = ("assistant", "user", "system")


@dataclass(eq=False, slots=True)
class _Row:
    """A sequence. segments: the lengths at which its KV is stored, including the end of prefill."""

    arrived: Arrived
    filled: int
    segments: list[tuple[int, Origin]]

    @property
    def number(self) -> int:
        return self.arrived.sequence

    @property
    def target(self) -> int:
        return len(self.arrived.tokens) - 1


@dataclass(frozen=True, slots=True)
class _Entry:
    key: PrefixKey
    origin: Origin
    nbytes: int


class Server:
    """A policy that plans like mlx_lm.server."""

    bounded = False

    def __init__(self, limits: Limits) -> None:
        self.limits = replace(limits, prompt_cache=0)
        self._news: list[Arrived] = []
        self._accepted_at = float("-inf")
        self._queue: deque[_Row] = deque()
        self._prompts: dict[int, _Row] = {}
        self._decoding: dict[int, _Row] = {}
        self._leaving: list[Leave] = []
        self._entries: dict[int, _Entry] = {}  # by age
        self._storing: dict[int, tuple[PrefixKey, Origin]] = {}
        self._evicting: list[int] = []
        self._latest_entry = 0
        self._steps = 0

    @property
    def busy(self) -> bool:
        rows = self._news or self._queue or self._prompts or self._decoding
        return bool(rows or self._leaving or self._storing or self._evicting)

    def plan(self, now: float, events: Iterable[PlannerEvent]) -> StepPlan:
        for event in events:
            self._learn(event)
        self._steps += 1
        leave, self._leaving = self._leaving, []
        starts = self._accept_new(now)
        decode = {_BATCH: len(self._decoding)} if self._decoding else {}
        joins: list[Join] = []
        prefill: tuple[tuple[Prefill, ...], ...] = ()
        keep: list[Leave] = []
        if len(self._decoding) < _SEQUENCES:
            while (
                self._queue
                and len(self._prompts) < _PROMPTS
                and len(self._prompts) + len(self._decoding) < _SEQUENCES
            ):
                row = self._queue.popleft()
                self._prompts[row.number] = row
            for row in list(self._prompts.values()):
                if row.filled >= row.target:
                    self._decoding[row.number] = self._prompts.pop(row.number)
                    joins.append(Join(row.number, _BATCH))
            prefill, keep = self._pass()
            decode = {_BATCH: len(self._decoding)} if self._decoding else {}
        evict, self._evicting = self._evicting, []
        return ServerPlan(
            number=self._steps,
            evict=tuple(evict),
            leave=tuple(leave),
            start=tuple(starts),
            join=tuple(joins),
            decode=decode,
            prefill=prefill,
            keep=tuple(keep),
        )

    def _learn(self, event: PlannerEvent) -> None:
        match event:
            case Arrived():
                self._news.append(event)
            case Prefilled(number, filled):
                if row := self._prompts.get(number):
                    row.filled = filled
            case Generated(tokens):
                for number, own in tokens.items():
                    self._decoding[number].filled += len(own)
            case Ended(number):
                self._ended(number)
            case Stored():
                key, origin = self._storing.pop(event.entry)
                length = event.length
                key = key.prefix(length) if length <= len(key) else key.extended(event.after)
                entry = _Entry(key, origin, event.nbytes)
                self._insert(event.entry, entry, trims=event.places is None)

    def _ended(self, number: int) -> None:
        entry = None
        row = self._decoding.pop(number, None)
        if row is not None:
            entry = self._entry(row, "assistant")
        self._prompts.pop(number, None)
        self._queue = deque(row for row in self._queue if row.number != number)
        self._news = [news for news in self._news if news.sequence != number]
        self._leaving.append(Leave(number, entry))

    def _accept_new(self, now: float) -> list[Start]:
        """Accept new requests, with the stored KV that they can start from."""
        running = self._queue or self._prompts or self._decoding
        if running and now - self._accepted_at < _ACCEPTS_EVERY:
            return []
        self._accepted_at = now
        starts: list[Start] = []
        for arrived in self._news:
            source = self._nearest(arrived.key)
            filled = source.length if source else 0
            target = len(arrived.tokens) - 1
            ends: list[tuple[int, Origin]] = [(place, "system") for place in arrived.places]
            ends.append((target, "user"))
            segments = [end for end in ends if filled < end[0] <= target]
            self._queue.append(_Row(arrived, filled, segments))
            starts.append(Start(arrived.sequence, arrived.tokens, source))
        self._news.clear()
        if starts:
            self._trim({start.source.number for start in starts if start.source})
        return starts

    def _trim(self, copied: set[int]) -> None:
        """Evict entries that do not fit in memory next to the KV of all requests."""
        cost = self.limits.cost
        rows = [*self._queue, *self._prompts.values(), *self._decoding.values()]
        left = self.limits.room - sum(cost.of(row.filled) for row in rows)
        while self._entries and sum(entry.nbytes for entry in self._entries.values()) > left:
            oldest = self._oldest()
            if oldest in copied:
                # it is released when the next requests start, because entries are evicted before
                # they are copied
                break
            self._evict(oldest)

    def _pass(self) -> tuple[tuple[tuple[Prefill, ...], ...], list[Leave]]:
        """One pass over all prompts, and the entries that are stored after it."""
        parts: list[Prefill] = []
        keep: list[Leave] = []
        for row in self._prompts.values():
            end, origin = row.segments[0]
            stop = min(end, row.filled + _STEP)
            if stop == end:
                row.segments.pop(0)
                keep.append(Leave(row.number, self._entry(row, origin)))
            parts.append(Prefill(row.number, row.filled, stop))
        return ((tuple(parts),) if parts else ()), keep

    def _entry(self, row: _Row, origin: Origin) -> int:
        self._latest_entry += 1
        self._storing[self._latest_entry] = (row.arrived.key, origin)
        return self._latest_entry

    # LRUPromptCache, whose order is that of insertion: a lookup does not count as use.

    def _nearest(self, key: PrefixKey) -> Source | None:
        most = len(key) - 1
        best: Source | None = None
        for number, entry in self._entries.items():
            length = min(entry.key.shared(key), most)
            if not self.limits.trims and length < len(entry.key):
                continue
            if length > (best.length if best else 0):
                best = Source("entry", number, length)
        return best

    def _insert(self, number: int, entry: _Entry, *, trims: bool) -> None:
        known = list(self._entries.items())
        for old, other in known:
            length = len(other.key)
            within = length <= len(entry.key) and other.key.shared(entry.key) == length
            if within and (trims or length == len(entry.key)):
                self._evict(old)
        self._entries[number] = entry
        if len(self._entries) > _ENTRIES:
            self._evict(self._oldest())

    def _oldest(self) -> int:
        """The entry to evict: the oldest of the first kind in `_ORDER` with enough entries.

        Enough means at least as many as the next kind.
        """
        by_origin = {
            origin: [n for n, entry in self._entries.items() if entry.origin == origin]
            for origin in _ORDER
        }
        for less, more in pairwise(_ORDER):
            if by_origin[less] and len(by_origin[less]) >= len(by_origin[more]):
                return by_origin[less][0]
        return by_origin[_ORDER[-1]][0]

    def _evict(self, number: int) -> None:
        del self._entries[number]
        self._evicting.append(number)
