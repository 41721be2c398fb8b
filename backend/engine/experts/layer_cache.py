"""Caches some experts of a layer in memory, and computes a pass with them.

A pass waits for the device in `LayerCache.__call__`, because the selected experts determine what to
read. So a pass is computed while it is launched, on a GPU too.

If a slot is overwritten before an earlier pass is computed, MLX writes to a copy of all slots. To
avoid the copy, MLX computes each layer's result immediately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.engine_state import ExpertCounts
from backend.engine.experts.expert_tensors import Location
from backend.engine.experts.read_ahead import MOST_TOKENS, Router
from backend.engine.experts.weight_files import Reading, WeightFiles

_FADING = 0.98  # factor on each expert's worth in each pass
_PASSING = 4  # a pass that needs more experts than there are slots replaces 1/4 of these at a time


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a projection, and its location in the files."""

    projection: Any
    name: str
    location: Location

    @property
    def slots(self) -> mx.array:
        """The values of all slots."""
        values: mx.array = self.projection[self.name]
        return values


@dataclass(eq=False)
class LayerCache:
    """The slots of one layer."""

    switch: Any  # mlx-lm's layer, whose parameters have one row per slot
    parameters: Sequence[Parameter]  # all parameters of `switch`
    files: WeightFiles
    portion: int  # maximum number of bytes that are read before they are written to slots
    counts: ExpertCounts
    # The next layer and its router, set when all layers have caches; None if there is none.
    following: tuple[LayerCache, Router] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # Several parameters may be made from the same bytes, which are read once.
        self._sources = list(
            dict.fromkeys(source for each in self.parameters for source in each.location.sources)
        )
        first = self.parameters[0]
        experts, slots = len(first.location.spans), first.slots.shape[0]
        self._slot = np.full(experts, -1)  # the slot of each expert; -1 if it is not in memory
        self._expert = np.full(slots, -1)  # the expert in each slot; -1 if the slot is empty
        self._worth = np.zeros(experts)
        # An expert may need more bytes in memory than in the files, or less.
        read = sum(spans[0].size for spans in self._sources)
        self._step = max(self.portion // max(read, self.nbytes // slots), 1)
        self._read = read
        self._ahead: dict[int, Reading] = {}  # by expert, reads that began before the router chose

    @property
    def nbytes(self) -> int:
        return sum(parameter.slots.nbytes for parameter in self.parameters)

    @property
    def experts(self) -> int:
        return len(self._slot)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Return the layer's result, [..., selected, width].

        Raises ExpertsUnreadable. The cache can be used after this error.

        x: [..., width].
        indices: the numbers of the selected experts, [..., selected].
        """
        likely = self._likely(x, indices)
        mx.eval(indices, likely)  # the only wait for the device
        selected = np.array(indices)
        experts = np.unique(selected)
        self._worth *= _FADING
        self._worth[experts] += 1
        missing = experts[self._slot[experts] < 0]
        self.counts.hits += len(experts) - len(missing)
        self.counts.misses += len(missing)
        self._abandon_all_but(missing)
        self.counts.ahead_hits += len(self._ahead)
        if len(experts) > len(self._expert):
            result = self._in_groups(x, selected, experts)
        else:
            self._bring(experts)
            result = self.switch(x, mx.array(self._slots_of(selected)))
        if self.following and likely is not None:
            # Before the launch, which lets the threads have Python's lock.
            self.following[0].read_ahead(np.array(likely))
        # Until the result is computed, it refers to the slots, and writing to them needs a copy.
        mx.async_eval(result)
        return result

    def _likely(self, x: mx.array, indices: mx.array) -> mx.array | None:
        """Return the experts that the next layer probably selects; None not to read any."""
        if self.following is None or x.size // x.shape[-1] > MOST_TOKENS:
            return None
        return self.following[1].choose(x, indices.shape[-1])

    def read_ahead(self, likely: np.ndarray) -> None:
        """Begin to read missing experts that this layer probably selects.

        likely: numbers of experts; the most frequent numbers are read first. Longcat's router also
            chooses numbers that belong to no expert, for which nothing is computed.
        """
        self._abandon_all_but(np.array([], int))
        experts, count = np.unique(likely[likely < self.experts], return_counts=True)
        experts = experts[np.argsort(-count, kind="stable")]
        most = self._step - -(-self.files.abandoned_bytes // self._read)
        for expert in experts[self._slot[experts] < 0][: max(most, 0)]:
            self._ahead[int(expert)] = self._begin(np.array([expert]))

    def _abandon_all_but(self, experts: np.ndarray) -> None:
        for expert in self._ahead.keys() - set(experts.tolist()):
            self.files.abandon(self._ahead.pop(expert))

    def _in_groups(self, x: mx.array, selected: np.ndarray, experts: np.ndarray) -> mx.array:
        """Compute the result for more experts than there are slots, one group at a time.

        A token's results for different experts do not depend on each other.
        """
        rows, flat = x.reshape(-1, x.shape[-1]), selected.reshape(-1)
        parts: list[mx.array] = []
        positions: list[np.ndarray] = []
        for group in self._groups(experts):
            self._bring(group, after=parts[-1:])
            at = np.flatnonzero(np.isin(flat, group))
            own = rows[mx.array(at // selected.shape[-1])]
            part = self.switch(own, mx.array(self._slots_of(flat[at][:, None])))[:, 0]
            mx.async_eval(part)
            parts.append(part)
            positions.append(at)
        order = mx.array(np.argsort(np.concatenate(positions)))
        return mx.concatenate(parts)[order].reshape(*selected.shape, -1)

    def _groups(self, experts: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the experts in memory as the first group, and then the rest in small groups.

        Small groups leave most slots unchanged for the next pass.
        """
        inside = self._slot[experts] >= 0
        if inside.any():
            yield experts[inside]
        rest, size = experts[~inside], max(len(self._expert) // _PASSING, 1)
        for start in range(0, len(rest), size):
            yield rest[start : start + size]

    def _slots_of(self, experts: np.ndarray) -> np.ndarray:
        slots: np.ndarray = self._slot[experts].astype(np.uint32)
        return slots

    def _bring(self, experts: np.ndarray, after: Sequence[mx.array] = ()) -> None:
        """Read the missing experts into the slots of the experts with the least worth.

        experts: the experts to bring into memory, at most as many as there are slots.
        after: results that may still be computed from the slots.
        """
        missing = experts[self._slot[experts] < 0]
        if not len(missing):
            return
        begun = np.array([expert in self._ahead for expert in missing])
        missing = missing[np.argsort(~begun, kind="stable")]
        worth = np.where(self._expert < 0, -1, self._worth[self._expert])
        worth[self._slot[experts[self._slot[experts] >= 0]]] = np.inf
        slots = np.argsort(worth, kind="stable")[: len(missing)]
        portions = [
            (missing[at : at + self._step], slots[at : at + self._step])
            for at in range(0, len(missing), self._step)
        ]
        reading = self._readings(portions[0][0])
        mx.eval(*after)
        for at, (own, free) in enumerate(portions):
            ready = reading
            if more := portions[at + 1 : at + 2]:
                reading = self._readings(more[0][0])
            self._write(own, free, ready, wait=bool(more))

    def _readings(self, experts: np.ndarray) -> list[Reading]:
        """Return reads of the experts, in this order. Experts that are read ahead come first."""
        begun = [self._ahead.pop(expert) for expert in experts.tolist() if expert in self._ahead]
        rest = experts[len(begun) :]
        return [*begun, self._begin(rest)] if len(rest) else begun

    def _begin(self, experts: np.ndarray) -> Reading:
        return self.files.begin([[spans[expert] for expert in experts] for spans in self._sources])

    def _write(
        self, experts: np.ndarray, slots: np.ndarray, readings: list[Reading], *, wait: bool
    ) -> None:
        """Write experts into the slots' arrays.

        Raises ExpertsUnreadable, before anything changes.

        wait: whether to wait until the slots are written.
        """
        raw = self.files.finish(readings)
        self._slot[self._expert[slots][self._expert[slots] >= 0]] = -1
        self._expert[slots] = -1
        at = mx.array(slots.astype(np.uint32))
        try:
            read = dict(zip(self._sources, raw, strict=True))
            for parameter in self.parameters:
                own = [read[source] for source in parameter.location.sources]
                parameter.slots[at] = parameter.location.values(own, parameter.slots)
            evaluate = mx.eval if wait else mx.async_eval  # both allocate memory immediately
            evaluate([parameter.slots for parameter in self.parameters])
        except Exception:
            self._empty()
            raise
        self._expert[slots] = experts
        self._slot[experts] = slots

    def _empty(self) -> None:
        """Empty all slots, because a failed allocation leaves some of them in an unknown state."""
        self._slot[:], self._expert[:] = -1, -1
        for parameter in self.parameters:
            parameter.projection[parameter.name] = mx.zeros_like(parameter.slots)
