"""The KV of stored entries: the executor's side of the prompt cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from backend.engine.caching import kv
from backend.engine.executing.failure import Failure
from backend.engine.planning.plan import NotStored, PlannerEvent, Stored


@dataclass(slots=True)
class KeptEntry:
    """Stored KV of `tokens`, and snapshots of the layers that cannot be truncated.

    prompt: how many of the tokens are the prompt's. nbytes: 0 until the entry has been computed.
    """

    cache: kv.RowCache
    tokens: Sequence[int]
    prompt: int
    snapshots: dict[int, kv.Snapshot]
    nbytes: int = 0


class KeptEntries:
    """The stored entries, by the planner's numbers.

    places: whether each entry lists the lengths at which it can be used even if its own layers can
    all be truncated, because those of other ranks may not.
    """

    def __init__(self, *, places: bool) -> None:
        self.by_number: dict[int, KeptEntry] = {}
        self._places = places
        self._lost: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.by_number.values())

    def snapshots(self) -> Iterator[kv.Snapshot]:
        for entry in self.by_number.values():
            yield from entry.snapshots.values()

    def evict(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.by_number.pop(number, None)

    def lose(self, number: int | None) -> None:
        """Forget an entry that could not be stored."""
        self._lost += [] if number is None else [number]

    def settle(self, events: list[PlannerEvent]) -> list[Failure]:
        """Wait for the new entries, and report their sizes or failures."""
        events += [NotStored(number) for number in self._lost]
        self._lost.clear()
        failures: list[Failure] = []
        for number, entry in list(self.by_number.items()):
            if entry.nbytes:
                continue
            try:
                kv.evaluate(entry.cache)
                kept = [kv.evaluated(snapshot) for snapshot in entry.snapshots.values()]
            except Exception as fault:
                failures.append(Failure((), "prompt cache", fault))
                del self.by_number[number]
                events.append(NotStored(number))
                continue
            entry.nbytes = max(kv.nbytes(entry.cache) + sum(kept), 1)
            length = len(entry.tokens)
            places = None
            if self._places or not kv.can_trim(entry.cache):
                places = tuple(sorted({*entry.snapshots, length}))
            after = tuple(entry.tokens[entry.prompt :])
            events.append(Stored(number, length, after, entry.nbytes, places))
        return failures
