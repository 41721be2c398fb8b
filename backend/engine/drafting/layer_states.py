"""The hidden states in front of some of a model's layers, which EAGLE-3 and DFlash draft from.

mlx-lm returns no hidden states, and mlx-vlm does for a few families only
(`capture_layer_ids`). In the models of both, a layer receives what the layers before it have made,
so the layers are patched to pass it on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.patching import patch

_TRIAL = (1, 2, 3)


class LayerStates:
    """The states of a model at `places`: place i is in front of layer i, counted from 0.

    found: whether the model has these layers and passes them its states.
    """

    def __init__(self, model: Any, places: Sequence[int], size: int) -> None:
        self._places = tuple(places)
        self._at: dict[int, mx.array] = {}
        self._seen: list[mx.array] | None = None
        layers = list(getattr(model, "layers", ()))
        self.found = bool(places) and 0 <= min(places) <= max(places) < len(layers)
        if self.found:
            for place in set(places):
                patch(layers[place], partial(self._pass, place))
            with self.watched() as seen:
                model(mx.array([_TRIAL]), cache=kv.new_row(model))
            shapes = [hidden.shape for hidden in seen]
            self.found = shapes == [(1, len(_TRIAL), size * len(places))]

    @contextmanager
    def watched(self) -> Iterator[list[mx.array]]:
        """Collect the states of each pass, [rows, tokens, places * size]."""
        seen: list[mx.array] = []
        self._seen = seen
        try:
            yield seen
        finally:
            self._seen = None
            self._at = {}

    def _pass(self, place: int, own: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._seen is not None and args and isinstance(args[0], mx.array):
            self._at[place] = args[0]
            if place == max(self._places) and len(self._at) == len(set(self._places)):
                self._seen.append(mx.concatenate([self._at[at] for at in self._places], -1))
                self._at = {}
        return own(layer, *args, **kwargs)
