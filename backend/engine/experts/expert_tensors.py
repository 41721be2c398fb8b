"""Finds where a checkpoint's files hold the weights of each expert.

Checkpoints differ: each expert has its own tensor, or all share one; two projections may be fused,
one after the other or with alternating rows; matrices may be transposed. So this module does not
search by name. It tries each tensor of the same layer that has as many values as the parameter, and
each series of tensors whose names differ in one number. It accepts a candidate if its bytes are the
weights that the model's own code has loaded, for every expert.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from backend.engine.experts.weight_files import Span, Tensor, WeightFiles
from backend.engine.loading.stages import Stages
from backend.engine.units import MIB

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_COMPARED_BYTES = 32 * MIB  # size of experts compared in one stage of a load
_BLOCK = 128  # rows and columns of an FP8 matrix that share a scale
_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}


@dataclass(frozen=True, slots=True)
class Location:
    """The part of the files from which one parameter of a layer is made."""

    spans: tuple[Span, ...]  # the bytes of each expert
    dtype: mx.Dtype  # the data type in the files
    # `whole` for values as they are, `even` or `odd` for every other row, `turned` for the
    # transposed matrix, `turned first` or `turned second` for a half of the transposed matrix.
    form: str
    # The location of the scales of an FP8 matrix, one scale per block; None without scales.
    scales: Location | None = None

    @property
    def sources(self) -> list[tuple[Span, ...]]:
        """All bytes that `values` needs."""
        return [self.spans, *(self.scales.sources if self.scales else ())]

    def values(self, raw: Sequence[mx.array], like: mx.array) -> mx.array:
        """Return the values of some experts in the shape of the parameter, [experts, …].

        raw: the bytes of each source, [experts, bytes].
        like: the parameter.
        """
        first, *rest = raw
        if self.scales is not None:
            return _dequantised(first, rest[0].view(self.scales.dtype), like)
        return self._formed(first, like)

    def _formed(self, raw: mx.array, like: mx.array) -> mx.array:
        count, shape = raw.shape[0], like.shape[1:]
        values = raw.view(self.dtype)
        if not _both_floating(self.dtype, like.dtype):
            values = values.view(like.dtype)
        match self.form:
            case "whole":
                values = values.reshape(count, *shape)
            case "even" | "odd":
                rows = values.reshape(count, shape[0], 2, *shape[1:])
                values = rows[:, :, int(self.form == "odd")]
            case _:
                halves = values.reshape(count, shape[1], -1, shape[0])
                values = halves[:, :, int(self.form == "turned second")].swapaxes(1, 2)
        return values.astype(like.dtype)


class LocationFinder:
    """Finds the parameters of one model in its weight files."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        # by the numbers in the names: single tensors first, then those of all experts
        self._series: defaultdict[tuple[str, ...], list[list[Tensor]]] = defaultdict(list)
        self._scales: dict[Span, Tensor] = {}  # the scales of each FP8 matrix, by the matrix's span
        groups: defaultdict[tuple[str, ...], dict[int, Tensor]] = defaultdict(dict)
        for name, tensor in files.tensors.items():
            if scales := files.tensors.get(f"{name}_scale_inv"):
                self._scales[tensor.span] = scales
            numbers = tuple(_NUMBER.findall(name))
            self._series[numbers].append([tensor])
            if numbers:
                *before, number, after = re.split(r"\.(\d+)(?=\.)", name)
                groups[(*before, after)][int(number)] = tensor
        for parts, members in groups.items():
            if members.keys() == set(range(len(members))):
                numbers = tuple(_NUMBER.findall(".".join(parts[:-1]) + "."))
                self._series[numbers].append([members[at] for at in range(len(members))])

    def find(self, path: str, weight: mx.array) -> Stages[Location | None]:
        """Return where a parameter is; None if no tensor contains its values. Ends on `engine`.

        path: the parameter's path in the model.
        weight: the parameter as the model's own code has loaded it, [experts, …].
        """
        for location in self._candidates(tuple(_NUMBER.findall(path)), weight):
            if self._equal(location, weight, slice(0, 1)):
                step = max(_COMPARED_BYTES // max(location.spans[0].size, 1), 1)
                for start in range(1, weight.shape[0], step):
                    yield "engine"
                    if not self._equal(location, weight, slice(start, start + step)):
                        break
                else:
                    return location
        return None

    def _equal(self, location: Location, weight: mx.array, experts: slice) -> bool:
        sources = [spans[experts] for spans in location.sources]
        raw = self._files.finish([self._files.begin(sources)])
        word = _WORDS[weight.dtype.size]  # compared as words, because NaN differs from itself
        found = location.values(raw, weight)
        return bool(mx.array_equal(found.view(word), weight[experts].view(word)))

    def _candidates(self, numbers: tuple[str, ...], weight: mx.array) -> Iterator[Location]:
        experts, size = weight.shape[0], math.prod(weight.shape[1:])
        for tensors in self._series[numbers]:
            first = tensors[0]
            if any((each.dtype, each.shape) != (first.dtype, first.shape) for each in tensors):
                continue
            spans = _by_expert(tensors, experts)
            if not spans:
                continue
            if first.span in self._scales:
                scales = [self._scales[each.span] for each in tensors]
                own = tuple(_by_expert(scales, experts))
                blocks = math.prod(-(-size // _BLOCK) for size in weight.shape[1:])
                found = own and own[0].size == blocks * scales[0].dtype.size
                if found and weight.ndim == 3 and spans[0].size == size:
                    scale_location = Location(own, scales[0].dtype, "whole")
                    yield Location(tuple(spans), first.dtype, "whole", scale_location)
                continue
            stored = first.dtype if _both_floating(first.dtype, weight.dtype) else weight.dtype
            elements = spans[0].size / stored.size
            if elements == size:
                yield from _locations(spans, first.dtype, ["whole"], weight, ["turned"])
            elif elements == 2 * size:
                for half in range(2):
                    part = [_divided(span, 2)[half] for span in spans]
                    yield Location(tuple(part), first.dtype, "whole")
                turned = ["turned first", "turned second"]
                yield from _locations(spans, first.dtype, ["even", "odd"], weight, turned)


def _locations(
    spans: Sequence[Span], dtype: mx.Dtype, forms: list[str], weight: mx.array, turned: list[str]
) -> Iterator[Location]:
    """Yield a location for each form in `forms`, and for matrices also for each in `turned`."""
    if weight.ndim == 1:
        forms = [form for form in forms if form == "whole"]
    for form in (*forms, *(turned if weight.ndim == 3 else ())):
        yield Location(tuple(spans), dtype, form)


def _dequantised(raw: mx.array, scales: mx.array, like: mx.array) -> mx.array:
    """Return the values of FP8 matrices, computed as mlx-lm's models do for DeepSeek and others.

    raw: [experts, bytes].
    scales: the factors of the blocks, [experts, n].
    like: the parameter, [experts, rows, columns].
    """
    count, (rows, columns) = raw.shape[0], like.shape[1:]
    down, across = -(-rows // _BLOCK), -(-columns // _BLOCK)
    more = [(0, 0), (0, down * _BLOCK - rows), (0, across * _BLOCK - columns)]
    values = mx.pad(mx.from_fp8(raw.reshape(count, rows, columns), mx.bfloat16), more)
    blocks = values.reshape(count, down, _BLOCK, across, _BLOCK)
    scaled = blocks * scales.reshape(count, down, 1, across, 1)
    whole = scaled.reshape(count, down * _BLOCK, across * _BLOCK)[:, :rows, :columns]
    return whole.astype(mx.bfloat16).astype(like.dtype)


def _by_expert(tensors: Sequence[Tensor], experts: int) -> list[Span]:
    """Return the bytes of each expert in tensors; [] for tensors of another number of experts."""
    first = tensors[0]
    if len(tensors) == 1 != experts and first.shape and first.shape[0] == experts:
        return _divided(first.span, experts)
    return [each.span for each in tensors] if len(tensors) == experts else []


def _divided(span: Span, parts: int) -> list[Span]:
    size = span.size // parts
    return [Span(span.file, span.start + at * size, size) for at in range(parts)]


def _both_floating(one: mx.Dtype, other: mx.Dtype) -> bool:
    return mx.issubdtype(one, mx.floating) and mx.issubdtype(other, mx.floating)
