"""The experts of one layer that are in memory, in slots, and how a pass computes with them.

`LayerCache.__call__` is the only place where a pass waits for the device: which experts the router
has selected decides what is read, so the host must know it. In the order of a GPU too, the next
pass is therefore computed while it is launched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.engine_state import ExpertCounts
from backend.engine.experts.expert_tensors import Place
from backend.engine.experts.weight_files import Reading, Span, WeightFiles

_FADING = 0.98  # of an expert's worth, with each pass in which it is not used
_PASSING = 4  # the share of the slots, 1/4, that the rest of a long pass goes through


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a projection: where each expert's values are."""

    projection: Any
    name: str
    place: Place

    @property
    def slots(self) -> mx.array:
        """The values of all slots, in place of those of all experts."""
        values: mx.array = self.projection[self.name]
        return values


class LayerCache:
    """The slots of one layer, in place of its experts.

    switch: mlx-lm's layer, whose parameters are those of the slots. portion: bytes that are read
    before they are written to slots.
    """

    def __init__(
        self,
        switch: Any,
        parameters: Sequence[Parameter],
        files: WeightFiles,
        portion: int,
        counts: ExpertCounts,
    ) -> None:
        self._switch = switch
        self._parameters = parameters
        self._files = files
        self._counts = counts
        # Projections that are fused in the files are read once.
        self._sources: defaultdict[tuple[Span, ...], list[Parameter]] = defaultdict(list)
        for parameter in parameters:
            self._sources[parameter.place.spans].append(parameter)
        experts, slots = len(parameters[0].place.spans), parameters[0].slots.shape[0]
        self._slot = np.full(experts, -1)  # of each expert; -1 if it is not in memory
        self._expert = np.full(slots, -1)  # in each slot; -1 if it is empty
        self._worth = np.zeros(experts)
        self._step = max(portion // sum(spans[0].size for spans in self._sources), 1)

    @property
    def nbytes(self) -> int:
        return sum(parameter.slots.nbytes for parameter in self._parameters)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """What the layer computes for [..., width] and the numbers of experts, [..., selected].

        Raises ExpertsUnreadable; the slots are intact then.
        """
        selected = np.array(indices)  # waits for the device
        experts = np.unique(selected)
        self._worth *= _FADING
        self._worth[experts] += 1
        missing = int(np.count_nonzero(self._slot[experts] < 0))
        self._counts.hits += len(experts) - missing
        self._counts.misses += missing
        if len(experts) > len(self._expert):
            return self._in_groups(x, selected, experts)
        self._bring(experts)
        result: mx.array = self._switch(x, mx.array(self._slots_of(selected)))
        # A pass that is not computed yet would share the slots, so that new experts need a copy.
        mx.async_eval(result)
        return result

    def _in_groups(self, x: mx.array, selected: np.ndarray, experts: np.ndarray) -> mx.array:
        """The same for more experts than there are slots: each group of experts in turn.

        A token's results for different experts do not depend on each other.
        """
        rows, flat = x.reshape(-1, x.shape[-1]), selected.reshape(-1)
        parts: list[mx.array] = []
        places: list[np.ndarray] = []
        for group in self._groups(experts):
            self._bring(group, after=parts[-1:])
            at = np.flatnonzero(np.isin(flat, group))
            own = rows[mx.array(at // selected.shape[-1])]
            part = self._switch(own, mx.array(self._slots_of(flat[at][:, None])))[:, 0]
            mx.async_eval(part)
            parts.append(part)
            places.append(at)
        order = mx.array(np.argsort(np.concatenate(places)))
        return mx.concatenate(parts)[order].reshape(*selected.shape, -1)

    def _groups(self, experts: np.ndarray) -> Iterator[np.ndarray]:
        """The experts that are in memory, then the rest, which leaves most slots as they are."""
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
        """Read the experts that are missing into the slots of those that are worth least.

        after: results that are still computed from the slots.
        """
        missing = experts[self._slot[experts] < 0]
        if not len(missing):
            return
        worth = np.where(self._expert < 0, -1, self._worth[self._expert])
        worth[self._slot[experts[self._slot[experts] >= 0]]] = np.inf
        slots = np.argsort(worth, kind="stable")[: len(missing)]
        portions = [
            (missing[at : at + self._step], slots[at : at + self._step])
            for at in range(0, len(missing), self._step)
        ]
        reading = self._begin(portions[0][0])
        mx.eval(*after)
        for at, (own, free) in enumerate(portions):
            ready = reading
            if more := portions[at + 1 : at + 2]:
                reading = self._begin(more[0][0])
            self._write(own, free, ready, wait=bool(more))

    def _begin(self, experts: np.ndarray) -> Reading:
        return self._files.begin([[spans[expert] for expert in experts] for spans in self._sources])

    def _write(
        self, experts: np.ndarray, slots: np.ndarray, reading: Reading, *, wait: bool
    ) -> None:
        """Write what is read to the slots, in place. wait: until it is written."""
        raw = self._files.finish(reading)
        self._slot[self._expert[slots][self._expert[slots] >= 0]] = -1
        self._expert[slots] = -1
        at = mx.array(slots.astype(np.uint32))
        try:
            for read, parameters in zip(raw, self._sources.values(), strict=True):
                for parameter in parameters:
                    parameter.slots[at] = parameter.place.values(read, parameter.slots)
            evaluate = mx.eval if wait else mx.async_eval  # either allocates memory immediately
            evaluate([parameter.slots for parameter in self._parameters])
        except Exception:
            self._empty()
            raise
        self._expert[slots] = experts
        self._slot[experts] = slots

    def _empty(self) -> None:
        """Forget all experts: some slots may hold anything after a failed allocation."""
        self._slot[:], self._expert[:] = -1, -1
        for parameter in self._parameters:
            parameter.projection[parameter.name] = mx.zeros_like(parameter.slots)
