"""The engine's interface to the KV caches of mlx-lm.

All code that depends on mlx-lm's cache classes is here and in `gather`: which classes can be
truncated, which can be batched, and how a sequence joins and leaves a batch. A `RowCache` holds one
sequence: it is a list with one cache per layer. A `BatchCache` holds the sequences of one pass.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache, make_prompt_cache

from backend.engine.caching.gather import (
    can_gather,
    extracted,
    gathered,
    keeps_state,
    of_rows,
    rearranged,
)
from backend.engine.caching.layer_kv import LayerKV, RowShift, WindowKV
from backend.engine.caching.quantized_kv import QuantizedKV, QuantizedWindowKV
from backend.engine.planning.plan import CacheCost

RowCache = list[Any]
Snapshot = list[Any]  # per layer of a row: a copy, or None if the layer can be truncated
Member = tuple[list[Any], int]  # the layers of a row or a batch, and a sequence's index in them

_KEEP_ALL = (LayerKV, QuantizedKV, RowShift)
MOST_UNUSED = 0.25  # largest share of a pass's rows that may be unused
_SETTLED = 256  # shortest length, in tokens, at which layers of unknown kinds are measured


def new_row(model: Any) -> RowCache:
    """Return an empty cache for one sequence."""
    return list(map(of_rows, make_prompt_cache(model)))


def clone(cache: RowCache) -> RowCache:
    """Return an independent copy. Buffers are shared until one is written (MLX copies on write)."""
    return copy.deepcopy(cache)


def can_trim(cache: RowCache) -> bool:
    """Return whether the row can be truncated to any shorter prefix right now.

    A chunked cache that has dropped its oldest tokens claims to be trimmable, but is not.
    """
    return all(
        layer.is_trimmable() and not getattr(layer, "start_position", 0) for layer in leaves(cache)
    )


def always_trims(cache: RowCache) -> bool:
    """Return whether `can_trim` holds for the row at any length: no window, no recurrent state."""
    return all(map(_keeps_all, cache))


def can_remove_tokens(cache: RowCache) -> bool:
    """Return whether `BatchCache.begin` and `end` can remove tokens of the row's latest pass."""
    return all(
        _keeps_all(leaf) or isinstance(leaf, WindowKV) or keeps_state(leaf)
        for leaf in leaves(cache)
    )


def snapshot(layers: Sequence[Any], row: int = 0) -> Snapshot:
    """Return copies of the layers that cannot be truncated to any length, for one row."""
    return [None if _keeps_all(layer) else extracted((layer, row)) for layer in layers]


def evaluated(kept: Snapshot) -> int:
    """Compute a snapshot; returns its bytes. Raises what MLX raises."""
    mx.eval(states(kept))
    return snapshot_bytes(kept)


def states(kept: Snapshot) -> list[Any]:
    """Return the arrays that `mx.eval` has to compute for a snapshot."""
    return [layer.state for layer in kept if layer is not None]


def snapshot_bytes(kept: Snapshot, *, shared: bool = False) -> int:
    """Return the bytes of a snapshot.

    shared: whether the snapshot shares its recurrent states with its row; they then do not count.
    """
    layers = [layer for layer in kept if layer is not None]
    states = [leaf for leaf in leaves(layers) if keeps_state(leaf)] if shared else []
    return nbytes(layers) - nbytes(states)


def rewind(cache: RowCache, tokens: int, kept: Snapshot | None) -> bool:
    """Remove the last `tokens` tokens; layers that cannot be truncated return to a snapshot.

    kept: the snapshot at the new end; None if there is none.
    Returns False, with the cache unchanged, if the tokens cannot be removed.
    """
    if not tokens or can_trim(cache):
        return trim(cache, tokens)
    if kept is None:
        return False
    for at, layer in enumerate(cache):
        if kept[at] is not None:
            cache[at] = copy.deepcopy(kept[at])
        else:
            trim([layer], tokens)
    return True


def trim(cache: RowCache, tokens: int) -> bool:
    """Remove the last `tokens` tokens; returns False if a layer could not be truncated that far.

    The memory of many removed tokens is released.
    """
    if tokens and not all(layer.trim(tokens) == tokens for layer in cache):
        return False
    for leaf in leaves(cache):
        if isinstance(leaf, LayerKV):
            leaf.release()
    return True


def can_batch(cache: RowCache) -> bool:
    """Return whether rows with such caches can be decoded together."""
    return all(map(can_gather, cache))


def evaluate(cache: RowCache) -> None:
    """Compute all arrays of the cache. Raises what MLX raises."""
    mx.eval([layer.state for layer in cache])


def nbytes(cache: RowCache) -> int:
    return sum(layer.nbytes for layer in cache)


def start_copies(caches: Sequence[RowCache]) -> None:
    """Start to compute caches that have been copied from others. Raises what MLX raises.

    An array is freed when all copies of it are computed and nothing else refers to it. If the
    memory limit leaves too little for all copies beside their sources, the same array of all caches
    is copied before the next one, as soon as there is memory for it.
    caches: all copies of the same sources, with the layers of the same model.
    """
    turns: list[list[mx.array]] = []
    for layer in zip(*map(leaves, caches), strict=True):
        parts = zip_longest(*map(_arrays, layer))
        turns += [[part for part in turn if part is not None] for turn in parts]
    limit, whole = mx.get_memory_limit(), [part for turn in turns for part in turn]
    if mx.get_active_memory() + sum(part.nbytes for part in whole) <= limit:
        turns = [whole]
    for turn in turns:
        if mx.get_active_memory() + sum(part.nbytes for part in turn) > limit:
            mx.synchronize()
        mx.async_eval(turn)
    if len(turns) > 1:
        mx.synchronize()  # the next pass needs memory too


def _arrays(layer: Any) -> list[mx.array]:
    """Return the arrays of a layer, with all tokens written."""
    if getattr(layer, "keys", layer) is None:
        return []  # in this case, some of mlx-lm's caches cannot return their state
    found: Any = tree_flatten([layer.parts if isinstance(layer, LayerKV) else layer.state])
    return [array for _, array in found if isinstance(array, mx.array)]


class BatchCache:
    """The KV of sequences that are processed together; methods name a sequence by its index.

    The sequences share buffers (`layer_kv`), with a mask only if their lengths differ.
    `join` copies the sequences that stay and those that join once, into buffers that end at the
    next whole step. `leave` copies nothing until the layers are used again, so all leaves and joins
    between two steps cost one copy. A batch that is taken over as a whole is not copied.

    `arrange` puts sequences that join into rows that others have left, so that only the new ones
    are copied. The result depends on the history of joins and leaves alone, not on the kinds of the
    layers, so it is the same on every rank. MLX cannot move a row within a buffer without copying
    the buffer, so either all other rows stay where they are, or all are copied.

    Each change builds the new layers before it releases the old ones: if it raises an exception,
    nothing has changed. MLX computes lazily, so a lack of memory shows only when the layers are
    evaluated.

    rows: how many rows the buffers may have after the next `arrange`, including unused rows.
    keeps_unused: whether rows that sequences have left may stay in passes, up to the share
        MOST_UNUSED, for sequences that will join; `pass_rows` returns the rows of a pass.
    copied: whether the layers are copies that nothing has started to compute (`start_copies`).
    """

    def __init__(self, rows: Sequence[RowCache] = ()) -> None:
        """Use the rows as one batch; a single row is not copied."""
        self._layers: list[Any] = []
        self.rows, self.keeps_unused, self.copied = 0, False, False
        self._rows: list[int] = []  # for each sequence, its index in `_layers`
        self._width = 0  # rows of `_layers`
        # Rows, with unused ones, of the buffers of layers that grow with their sequences.
        # Counted even if this rank has no such layer: all ranks must make the same decisions.
        self._depth = 0
        self._settled = True  # whether `_layers` are exactly these sequences
        self._room = 0  # tokens for which the buffers have columns, or fewer
        # tokens per row in the pass between `begin` and `end`
        self._counts: Sequence[int] = ()
        self._before: list[list[Any]] = []  # recurrent states from before that pass
        self.join([(row, 0) for row in rows])

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def layers(self) -> list[Any]:
        """The caches for a call of the model, one per layer. Get them again after every change.

        Their rows are the sequences, in order, unless `pass_rows` returns another order.
        """
        if not self._settled:
            self.settle()
        return self._layers

    def settle(self) -> None:
        """Copy the sequences that remain after a leave, so that the larger arrays are freed."""
        if not self._settled:
            self._become([self.member(index) for index in range(len(self))])

    def expect(self, tokens: int) -> None:
        """Let buffers that grow become large enough for this many tokens of each sequence."""
        for leaf in leaves(self.layers):
            if isinstance(leaf, LayerKV):
                leaf.expected = tokens

    def reserve(self, tokens: int) -> None:
        """Let the buffers grow for a pass of this many tokens, if they must.

        They would also grow in the pass, where more arrays are copied at the same time. No pass
        without a call may come between two passes with one.
        """
        if tokens > self._room:
            growing = [leaf for leaf in leaves(self.layers) if isinstance(leaf, LayerKV)]
            if [leaf for leaf in growing if leaf.reserve(tokens)]:
                start_copies([self._layers])
            self._room = min([leaf.room for leaf in growing], default=sys.maxsize)
        self._room -= tokens

    def drop(self, tokens: Sequence[int]) -> None:
        """Remove the last `tokens[i]` tokens of each sequence i; recurrent states are left alone.

        Windows allow this only directly after the pass that appended the tokens. Unlike `trim`,
        this does not shrink the buffers: every step that checks draft tokens would then copy them.
        """
        self._drop(self.layers, self._per_row(tokens))

    def _drop(self, layers: Sequence[Any], tokens: Sequence[int]) -> None:
        """Remove tokens of each row, as `drop` does of each sequence."""
        if not any(tokens):
            return
        for leaf in leaves(layers):
            if isinstance(leaf, LayerKV):
                leaf.drop(tokens)
            elif not keeps_state(leaf) and leaf.trim(tokens[0]) != tokens[0]:
                raise ValueError(f"a layer of the cache cannot remove {tokens[0]} tokens")

    def begin(self, counts: Sequence[int]) -> list[Any]:
        """Return the layers for a pass whose last tokens `end` may remove; call it after the pass.

        The pass feeds tokens of shape [sequences, max(counts)]: `counts[i]` tokens for sequence i,
        at least one, then padding. Counts may differ if `can_prefill_together` returns True.
        """
        layers, counts = self.layers, self._per_row(counts)
        states = list(filter(keeps_state, leaves(layers)))
        if min(counts) < max(counts):
            for leaf in states:
                leaf.prepare(lengths=list(counts))
        self._counts = counts
        self._before = [list(leaf.cache) for leaf in states]
        return layers

    def end(self, wanted: Sequence[int]) -> list[int]:
        """Keep the first `wanted[i]` tokens of sequence i from the pass; returns how many remain.

        A recurrent state is known only after the last token of a pass. If fewer tokens are wanted,
        a sequence with such states returns to its state before the pass, and 0 tokens remain.
        """
        counts, before = self._counts, self._before
        self._counts, self._before = (), []
        kept = wanted = self._per_row(wanted)
        if before:
            whole = [want == count for want, count in zip(wanted, counts, strict=True)]
            kept = [want if stays else 0 for want, stays in zip(wanted, whole, strict=True)]
            states = filter(keeps_state, leaves(self._layers))
            for leaf, earlier in zip(states, before, strict=True):
                leaf.finalize()
                if not all(whole):
                    leaf.cache = _mixed(whole, leaf.cache, earlier)
        self._drop(self._layers, [max(counts) - count for count in kept])
        return [kept[row] for row in self._rows]

    @property
    def alone(self) -> bool:
        """Whether the layers have a single row, which may share arrays with a snapshot of it."""
        return self._width == 1

    @property
    def arranged(self) -> bool:
        """Whether `arrange` has nothing to do as long as no sequence joins."""
        count = len(self._rows)
        return self._settled and self._width == count and self._depth <= max(self.rows, count)

    @property
    def nbytes(self) -> int:
        return nbytes(self._layers)

    def member(self, index: int) -> Member:
        """Return the layers and the row that hold a sequence, for another batch to copy."""
        if len(self) == 1 and not self._settled:
            return [extracted((layer, self._rows[index])) for layer in self._layers], 0
        return self._layers, self._rows[index]

    def join(self, members: Sequence[Member]) -> None:
        """Append copies of the sequences, in order. Raises ValueError if they cannot be batched.

        A row that will be the only sequence is used without a copy.
        """
        if members:
            self._become([*map(self.member, range(len(self))), *members])

    def absorb(self, other: BatchCache, indices: Sequence[int]) -> list[int]:
        """Take over sequences of another batch. Returns what `arrange` returns."""
        order = list(range(len(self) + len(indices)))
        if not indices:
            return order
        if not len(self) and list(indices) == list(range(len(other))):
            self._layers, self._rows, self._settled = other._layers, other._rows, other._settled
            self._width, self._depth = other._width, other._depth
            self.copied, self._room = other.copied, 0
        elif len(order) == 1 < len(other):
            self.join([(other.extract(indices[0]), 0)])
        else:
            order = self.arrange(list(map(other.member, indices)))
        other.leave(indices)
        return order

    def arrange(self, joining: Sequence[Member] = ()) -> list[int]:
        """Prepare the layers for a pass, with copies of sequences that join, copying the least.

        Returns the earlier index of each sequence, in the new order; sequences that join count as
        the last ones of the earlier order. If none joins, the order does not change. Raises
        ValueError if the sequences cannot be batched.
        """
        count = len(self) + len(joining)
        if not joining and self.arranged:
            return list(range(count))
        if count < 2:
            if joining or not self._settled:
                self._become([*map(self.member, range(len(self))), *joining])
            return list(range(count))
        free = sorted(set(range(self._width)).difference(self._rows))
        rows = [*self._rows, *free[: len(joining)]]
        rows += range(self._width, self._width + count - len(rows))
        width = max(rows) + 1
        few = self.keeps_unused and width <= self.rows and width - count <= MOST_UNUSED * width
        fits = width == count or few
        if not fits or self._depth > max(self.rows, width):
            self._become([*((self._layers, row) for row in self._rows), *joining], rows=self.rows)
            return list(range(count))
        if joining or not self._settled:
            if empty := set(range(self._width)).difference(rows):
                for leaf in leaves(self._layers):
                    if isinstance(leaf, LayerKV):
                        leaf.abandon(empty, self._rows[0])
            members: list[Member] = [(self._layers, row) for row in range(width)]
            for row, member in zip(rows[len(self) :], joining, strict=True):
                members[row] = member
            self._become(members, self._layers, rows=self.rows)
            self._rows = sorted(rows)
        return sorted(range(count), key=rows.__getitem__)

    @property
    def pass_rows(self) -> tuple[list[int], list[int]] | None:
        """The sequence of each row of a pass, and the row of each sequence, by index.

        A row without a sequence is fed the tokens of the first one. None if there is no such row.
        """
        if self._width == len(self._rows):
            return None
        indices = {row: index for index, row in enumerate(self._rows)}
        return [indices.get(row, 0) for row in range(self._width)], self._rows

    def _per_row(self, numbers: Sequence[int]) -> list[int]:
        """Return a number for each row of a pass, from a number for each sequence."""
        rows = self.pass_rows
        return list(numbers) if rows is None else [numbers[index] for index in rows[0]]

    def leave(self, indices: Sequence[int]) -> None:
        """Drop sequences; the others keep their order."""
        gone = set(indices)
        if gone:
            self._rows = [row for index, row in enumerate(self._rows) if index not in gone]
            self._settled = False
        if not self._rows:
            self._layers, self._width, self._depth, self._settled = [], 0, 0, True

    def extract(self, index: int, *, start: bool = True) -> RowCache:
        """Return a copy of a sequence, in buffers that are no larger than their contents.

        The buffers of a running sequence are larger, and may be shared with a longer sequence.
        start: whether to start the copy now; otherwise the caller must, before the next pass.
        """
        alone = [extracted((layer, self._rows[index])) for layer in self._layers]
        if start:
            start_copies([alone])
        return alone

    def snapshot(self, index: int) -> Snapshot:
        return snapshot(self._layers, self._rows[index])

    def own_states(self) -> None:
        """Copy recurrent states, because some are views that keep a whole pass's results alive."""
        for leaf in leaves(self._layers):
            if keeps_state(leaf):
                leaf.cache = [
                    None if state is None else mx.contiguous(state) for state in leaf.cache
                ]

    def marker(self, snapshots: Sequence[Snapshot] = ()) -> mx.array:
        """Return a small array that is computed once the KV and these snapshots are.

        Wait for this array and not for the KV: a reference to the arrays of the KV would make MLX
        copy them in full when the next tokens are written. The tokens of the latest pass are moved
        into the windows, so that they do not use memory until the next pass.
        """
        kept = [layer for snapshot in snapshots for layer in snapshot if layer is not None]
        arrays = [part for leaf in leaves([*kept, *self._layers]) for part in _arrays(leaf)]
        latest = arrays[-1]
        mark: mx.array = latest[tuple(slice(-1, None) for _ in latest.shape)] * 1
        mx.async_eval(arrays, mark)
        return mark

    @contextmanager
    def prefill(self, counts: Sequence[int]) -> Iterator[list[Any]]:
        """Yield the layers for one forward pass over tokens of [sequences, max(counts)].

        Sequence i has `counts[i]` new tokens, at least one, then padding, whose results are
        discarded. Only for models for which `can_prefill_together` returns True. After an exception
        inside the block, the KV of the sequences is undefined.
        """
        if len(counts) != len(self) or min(counts) < 1:
            raise ValueError(f"{len(self)} sequences do not accept {list(counts)} tokens")
        if min(counts) == max(counts):
            yield self.layers
        else:
            yield self.begin(counts)
            self.end(counts)

    def _become(
        self, members: Sequence[Member], present: Sequence[Any] = (), *, rows: int = 0
    ) -> None:
        """Hold exactly these sequences, a single one as a row cache.

        present: the layers whose buffers may be used, of `rows` rows at most.
        """
        layers, _ = members[-1]
        depth = max(rows, len(members))
        if present and len(members) <= self._depth <= depth:
            depth = self._depth
        if keeps_states(self._layers):
            # The latest states are computed only when they are needed. Copies of all would
            # otherwise need all states before them too.
            start_copies([self._layers])
        if len(members) > 1:
            if not all(map(can_gather, layers)):
                raise ValueError("this model's caches hold one sequence at a time")
            by_layer = [[(own[at], row) for own, row in members] for at in range(len(layers))]
            if present:
                pairs = zip(present, by_layer, strict=True)
                layers = [rearranged(layer, own, depth) for layer, own in pairs]
            else:
                layers = [gathered(own, depth) for own in by_layer]
        self._layers, self._rows, self._settled = layers, list(range(len(members))), True
        self._width, self._depth, self.copied, self._room = len(members), depth, True, 0


def _mixed(new: Sequence[bool], after: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    """Return states: of each sequence, the one in `after` if `new` is true, else in `before`."""
    if not any(new):
        return list(before)
    stays = mx.array(list(new))
    return [
        None
        if state is None
        else mx.where(stays.reshape(-1, *[1] * (state.ndim - 1)), state, earlier)
        for state, earlier in zip(after, before, strict=True)
    ]


def vocabulary_size(model: Any) -> int:
    """Return the number of token ids. MLX does not check ids: a larger id reads out of bounds.

    Nothing is computed: the shape of the logits is enough.
    """
    return int(model(mx.array([[0]]), cache=new_row(model)).shape[-1])


def keeps_states(cache: RowCache) -> bool:
    """Return whether a layer is recurrent."""
    return any(map(keeps_state, leaves(cache)))


def known_sizes(cache: RowCache) -> bool:
    """Return whether `cost` can measure each layer with a single token."""
    return all(_is_measured(layer) for layer in leaves(cache))


def can_prefill_together(model: Any, *, tried: bool | None = None) -> bool:
    """Return whether sequences may have different numbers of tokens in `BatchCache.prefill`.

    Padding comes after a sequence's tokens, and attention never looks ahead. Recurrent layers must
    skip the padding, which not every model does: such models are tried on a few tokens.
    tried: True forces the trial and False skips it, if the recurrent layers are on another rank.
    """
    row = new_row(model)
    if tried is None:
        tried = keeps_states(row)
    return can_batch(row) and (not tried or _skips_padding(model))


def _skips_padding(model: Any) -> bool:
    """Return whether two texts run together, with padding, leave the same caches as when alone."""
    texts = [[1, 2, 3, 4], [4, 3, 2, 1]]
    batch = BatchCache([new_row(model), new_row(model)])
    alone = [new_row(model), new_row(model)]
    done = [0, 0]
    for counts in ((1, 3), (3, 1)):
        tokens = []
        for at, count in enumerate(counts):
            part = texts[at][done[at] : done[at] + count]
            done[at] += count
            feed_tokens(model, alone[at], [part])
            tokens.append(part + [0] * (max(counts) - count))
        with batch.prefill(counts) as layers:
            feed_tokens(model, layers, tokens)
    return all(_same_row(batch.extract(at), row) for at, row in enumerate(alone))


def _same_row(left: RowCache, right: RowCache) -> bool:
    """Return whether two rows hold equal values, up to rounding."""
    leaves: list[dict[str, Any]] = [{}, {}]
    for row, found in zip((left, right), leaves, strict=True):
        own = BatchCache([row]).extract(0)
        tree_flatten([layer.state for layer in own], destination=found)
    if leaves[0].keys() != leaves[1].keys():
        return False
    return all(
        alike(leaf, leaves[1][name])
        for name, leaf in leaves[0].items()
        if isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)
    )


def alike(array: mx.array, other: mx.array) -> bool:
    """Return whether arrays of numbers are equal up to rounding, which differs between kernels."""
    if array.shape != other.shape:
        return False
    error = mx.abs(array.astype(mx.float32) - other.astype(mx.float32)).max()
    return bool((error <= mx.abs(other.astype(mx.float32)).max() / 16).item())


def cost(model: Any, row: RowCache | None = None) -> CacheCost:
    """Measure the bytes of a row's KV.

    Layers of an unknown kind are measured at two lengths, each one token before a multiple of 256,
    where windows are full and groups of tokens that wait to be compressed are largest: the growth
    from one length to the other is the cost per token.
    row: the KV of a few tokens; None runs the model on one token.
    """
    if row is None:
        row = new_row(model)
        feed_tokens(model, row, [[0]])
    per_token = fixed = largest = state = 0
    windowed: list[tuple[int, int]] = []
    # What a pass dequantises, for each layer: of all tokens, and of a window.
    dense: list[int] = []
    dense_windows: list[tuple[int, int]] = []
    unknown = False
    for layer in leaves(row):
        if keeps_state(layer) or isinstance(layer, RowShift):
            fixed += layer.nbytes
            state = max(state, 0, *(array.nbytes for array in _arrays(layer)))
        elif isinstance(layer, (WindowKV, RotatingKVCache, ChunkedKVCache)):
            most = layer.chunk_size if isinstance(layer, ChunkedKVCache) else layer.max_size
            parts = layer.parts if isinstance(layer, LayerKV) else (layer.keys, layer.values)
            windowed.append((sum(part.nbytes for part in parts) // parts[0].shape[2], most))
            if isinstance(layer, QuantizedWindowKV):
                dense_windows.append((layer.packing.dense_bytes(layer), most))
        elif isinstance(layer, LayerKV):
            sizes = [part.nbytes // part.shape[2] for part in layer.parts]
            per_token, largest = per_token + sum(sizes), max(largest, *sizes, 0)
            if isinstance(layer, QuantizedKV):
                dense.append(layer.packing.dense_bytes(layer))
        elif hasattr(layer, "keys"):
            per_token += 0 if layer.keys is None else layer.nbytes // layer.keys.shape[2]
        else:
            unknown = True
    if unknown:
        row = new_row(model)
        layers = [layer for layer in leaves(row) if not _is_measured(layer)]
        feed_tokens(model, row, [[0] * (_SETTLED - 1)])
        before = nbytes(layers)
        feed_tokens(model, row, [[0] * _SETTLED])
        grown = -(-(nbytes(layers) - before) // _SETTLED)
        per_token += grown
        fixed += max(before - grown * (_SETTLED - 1), 0)
    # MLX allocates arrays for a layer while it still computes another.
    per_token += sum(sorted(dense)[-2:])
    windowed += [window for window in sorted(dense_windows)[-2:] if window[0]]
    return CacheCost(per_token, fixed, tuple(windowed), largest, state)


def _is_measured(layer: Any) -> bool:
    kinds = (LayerKV, RowShift, RotatingKVCache, ChunkedKVCache)
    return keeps_state(layer) or isinstance(layer, kinds) or hasattr(layer, "keys")


def _keeps_all(layer: Any) -> bool:
    """Return whether a layer stores every token, so that it can be truncated to any length."""
    return all(type(leaf) in _KEEP_ALL for leaf in leaves([layer]))


def feed_tokens(model: Any, layers: Sequence[Any], tokens: Sequence[Sequence[int]]) -> mx.array:
    """Run a pass and wait for it; returns the logits.

    MLX may compute unrelated passes in any order, but all ranks that divide a model must use the
    same order.
    """
    logits: mx.array = model(mx.array([*map(list, tokens)]), cache=layers)
    mx.eval(logits, [layer.state for layer in layers])
    return logits


def padded(rows: Sequence[Sequence[int]]) -> mx.array:
    """Return tokens as an array, [rows, tokens of the longest row], padded with zeros."""
    width = max(map(len, rows))
    return mx.array([[*tokens, *[0] * (width - len(tokens))] for tokens in rows])


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    for layer in cache:
        inner = getattr(layer, "caches", None)
        if inner is None:
            yield layer
        else:
            yield from leaves(inner)
