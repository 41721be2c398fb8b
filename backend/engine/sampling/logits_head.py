"""Computes the logits of selected tokens only.

The output projection is a model's largest matrix product, and a prompt needs it only for its last
token. mlx-lm's and mlx-vlm's models compute it for every token, so the projection layer is patched
to receive only the selected tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from backend.engine.caching import kv
from backend.engine.patching import patch

FIRST_TOKENS = (1, 2, 3)


class StateSource:
    """A part of a model that collects the hidden states with which it is called."""

    _seen: list[mx.array] | None = None
    _columns: mx.array | None = None

    @contextmanager
    def watched(self, columns: mx.array | None = None) -> Iterator[list[mx.array]]:
        """Collect the hidden states of each call, [rows, tokens, size], in order.

        columns: indices of the tokens to collect of each row, [rows, tokens]; None means all.
        """
        seen: list[mx.array] = []
        self._seen, self._columns = seen, columns
        try:
            yield seen
        finally:
            self._seen = self._columns = None

    def _collected(self, states: mx.array) -> mx.array:
        """Return the states of the tokens to collect; all if the rows run one after another."""
        columns = self._columns
        if columns is None or states.shape[0] != columns.shape[0]:
            return states
        return mx.take_along_axis(states, columns[:, :, None], axis=1)


class LogitsHead(StateSource):
    """The output projection of a model, which is called with the states of the last layer.

    All operations of the model on the logits after that layer (a softcap, a scale) still apply.
    path: the name of the layer in the model; '' if the layer was not found, and all logits are
        computed.
    finite: whether the largest logits of a few tokens are finite.
    project: the layer itself, from states [..., size] to logits [..., vocabulary].
    vocabulary: number of logits.
    """

    project: Callable[[mx.array], mx.array]

    def __init__(
        self,
        model: Any,
        vocabulary: int,
        path: str | None = None,
        *,
        first: mx.array | None = None,
    ) -> None:
        """Patch the layer.

        path: the name that an earlier load has found; None if the layer must be found.
        first: the logits of FIRST_TOKENS, [1, tokens, vocabulary], if they are already computed.
        """
        self.vocabulary = vocabulary
        self._positions: mx.array | None = None
        self.path, self.finite = path or "", True
        if path is not None:
            if path:
                self._narrow(dict(model.named_modules())[path])
            return

        def run() -> mx.array:
            logits: mx.array = model(mx.array([FIRST_TOKENS]), cache=kv.new_row(model))
            mx.eval(logits)  # before the next pass, because all ranks need the same order
            return logits

        whole = run() if first is None else first
        self.finite = bool(mx.isfinite(whole.max(axis=-1)).all())
        fitting = (
            name
            for name, layer in _candidates(model, vocabulary)
            if self._narrows(layer, run, whole)
        )
        self.path = next(fitting, "")

    @property
    def found(self) -> bool:
        return bool(self.path)

    def last(self, run: Callable[[], mx.array], counts: Sequence[int]) -> mx.array:
        """Return the logits of each row's last token, [rows, vocabulary].

        run: calls the model on tokens, [rows, tokens], and returns their logits.
        counts: number of tokens of each row, before the padding.
        """
        positions = [count - 1 for count in counts]
        self._positions = mx.array(positions) if self.found else None
        try:
            logits = run()
        finally:
            self._positions = None
        if logits.shape[1] == 1:
            return logits[:, 0]
        return _at(logits, mx.array(positions))[:, 0]

    def _narrows(self, layer: Any, run: Callable[[], mx.array], whole: mx.array) -> bool:
        """Patch a layer; returns whether the model then computes only the selected logits."""
        kind = type(layer)
        self._narrow(layer)
        self._positions = mx.array([1])
        try:
            found = run()
            fits = found.shape == (1, 1, whole.shape[-1]) and kv.alike(found[0, 0], whole[0, 1])
        except ValueError:  # shapes that the model cannot process
            fits = False
        finally:
            self._positions = None
        if not fits:
            layer.__class__ = kind
        return fits

    def _narrow(self, layer: Any) -> None:
        kind = type(layer)
        name = "as_linear" if hasattr(kind, "as_linear") else "__call__"
        own = getattr(kind, name)

        def narrowed(own: Any, of: Any, states: mx.array) -> Any:
            if self._seen is not None:
                self._seen.append(self._collected(states))
            if self._positions is not None and states.ndim == 3:
                states = _at(states, self._positions)
            return own(of, states)

        patch(layer, narrowed, name)
        self.project = lambda states: own(layer, states)


def _at(states: mx.array, positions: mx.array) -> mx.array:
    """Return the states of one token of each row, [rows, 1, size].

    states: [rows, tokens, size].
    positions: index of the token in each row, [rows].
    """
    return mx.take_along_axis(states, positions[:, None, None], axis=1)


def _candidates(model: Any, vocabulary: int) -> Iterator[tuple[str, Any]]:
    """Yield the layers as wide as the vocabulary, with their names.

    Linear layers come first, then embeddings (tied weights). Layers in lists (a model's blocks) are
    left out: they differ between the ranks of a pipeline, and each trial is a pass of all ranks.
    """
    kinds = (Linear, QuantizedLinear, Embedding, QuantizedEmbedding)
    wide = [
        (path, layer)
        for path, layer in model.named_modules()
        if isinstance(layer, kinds)
        and layer.weight.shape[0] >= vocabulary
        and not any(map(str.isdigit, path.split(".")))
    ]
    yield from sorted(wide, key=lambda module: hasattr(module[1], "as_linear"))
