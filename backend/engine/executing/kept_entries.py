"""The executor's part of the prompt cache: KV of cached prefixes, and which KV is saved to disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backend.engine.caching import kv
from backend.engine.executing.executor_sequence import ExecutorSequence, Failure
from backend.engine.model import EngineModel
from backend.engine.planning.plan import NotStored, PlannerEvent, Stored


@dataclass(slots=True)
class KeptEntry:
    """A cached prefix: the KV of `tokens`, and snapshots of the layers that cannot be truncated.

    prompt: how many of the tokens belong to the prompt.
    snapshots: by length.
    nbytes: 0 until the KV has been computed.
    """

    cache: kv.RowCache
    tokens: Sequence[int]
    prompt: int
    snapshots: dict[int, kv.Snapshot]
    nbytes: int = 0


class KeptEntries:
    """The cached prefixes, by the planner's numbers.

    nbytes: bytes of all cached prefixes whose KV has been computed.
    positions: whether to report checkpoint positions even if all layers can be truncated, because
        layers on other ranks may not.
    """

    def __init__(self, *, positions: bool) -> None:
        self.by_number: dict[int, KeptEntry] = {}
        self.nbytes = 0
        self._positions = positions
        self._new: list[int] = []
        self._lost: list[int] = []
        # How many cached prefixes have a snapshot, by the snapshot's id.
        self._snapshots: Counter[int] = Counter()

    def has_snapshot(self, snapshot: kv.Snapshot) -> bool:
        """Return whether a cached prefix has this object as a snapshot."""
        return id(snapshot) in self._snapshots

    def add(self, number: int, entry: KeptEntry) -> None:
        """Store a cached prefix; the next `settle` waits for its KV."""
        self.by_number[number] = entry
        self._new.append(number)
        self._snapshots.update(map(id, entry.snapshots.values()))

    def take(self, number: int) -> KeptEntry:
        """Remove and return a cached prefix. Raises KeyError for an unknown number."""
        entry = self.by_number.pop(number)
        self.nbytes -= entry.nbytes
        for known in map(id, entry.snapshots.values()):
            self._snapshots[known] -= 1
            if not self._snapshots[known]:
                del self._snapshots[known]
        return entry

    def evict(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self.by_number:
                self.take(number)

    def clear(self) -> None:
        self.evict(list(self.by_number))
        self._new, self._lost = [], []

    def lose(self, number: int | None) -> None:
        """Report at the next `settle` that a cached prefix could not be stored."""
        self._lost += [] if number is None else [number]

    @property
    def new(self) -> list[kv.RowCache]:
        """The KV of the cached prefixes that the next `settle` waits for."""
        return [self.by_number[number].cache for number in self._new if number in self.by_number]

    def settle(self, events: list[PlannerEvent]) -> list[Failure]:
        """Wait for the KV of new cached prefixes, and report their sizes or failures."""
        failures: list[Failure] = []
        if not (self._new or self._lost):
            return failures
        events += [NotStored(number) for number in self._lost]
        self._lost.clear()
        new, self._new = self._new, []
        for number in new:
            if (entry := self.by_number.get(number)) is None:
                continue
            try:
                kv.evaluate(entry.cache)
                kept = [kv.evaluated(snapshot) for snapshot in entry.snapshots.values()]
            except Exception as fault:
                failures.append(Failure((), "prompt cache", fault))
                self.take(number)
                events.append(NotStored(number))
                continue
            entry.nbytes = max(kv.nbytes(entry.cache) + sum(kept), 1)
            self.nbytes += entry.nbytes
            length = len(entry.tokens)
            positions = None
            if self._positions or not kv.can_trim(entry.cache):
                positions = tuple(sorted({*entry.snapshots, length}))
            after = tuple(entry.tokens[entry.prompt :])
            events.append(Stored(number, length, after, entry.nbytes, positions))
        return failures


class PrefixFiles:
    """Saves the KV that requests of one loaded model ask to store on disk."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model

    def want_answer(self, sequence: ExecutorSequence) -> bool:
        return sequence.finished and sequence.request.disk.saves_answer and self._may_hold(sequence)

    def want_prompt(self, sequence: ExecutorSequence) -> bool:
        """Return whether to save the prompt without its last token, which gives the logits."""
        if sequence.scoring is not None or not self._may_hold(sequence):
            return False
        return sequence.request.disk.saves_prompt(trimmable=self._model.trims)

    def save(self, sequence: ExecutorSequence, tokens: Sequence[int], cache: kv.RowCache) -> None:
        """Pass a copy of the KV to the disk thread."""
        assert self._model.disk is not None
        kv.evaluate(cache)
        copied, trimmable = kv.clone(cache), kv.can_trim(cache)
        path = sequence.request.disk.path
        self._model.disk.save(list(tokens), copied, trimmable=trimmable, path=path)

    def _may_hold(self, sequence: ExecutorSequence) -> bool:
        """Return whether the sequence's KV can be in a file; it cannot with media or an adapter."""
        disk = self._model.disk
        return (
            disk is not None
            and sequence.media is None
            and not sequence.request.adapter
            and disk.has_files(sequence.request.disk.path)
        )
