"""The features of images, videos and sounds: the embeddings that the language model receives.

Each item is encoded on its own, with its placeholder tokens and no others, so its features depend
only on its content and can be reused in every prompt that contains it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.vision.media_plan import MediaItem
from backend.engine.vision.multimodal_model import MultimodalModel

# Outputs of mlx-vlm's get_input_embeddings. Positions are ignored: they are computed for the whole
# prompt instead.
_DEEP = "deepstack_visual_embeds"
_KNOWN = {"inputs_embeds", "visual_pos_masks", _DEEP, "per_layer_inputs"}
_KNOWN |= {"position_ids", "rope_deltas"}


class UnusualFeaturesError(Exception):
    """The family's features have outputs that are not supported; the argument names them."""


@dataclass(frozen=True, slots=True)
class Features:
    """Embeddings of tokens: of an item, or of a piece of text.

    embeddings: [tokens, hidden].
    visual: [tokens] bool, the tokens to which `deep` is added.
    deep: for each layer that adds any, an array [visual tokens, hidden].
    by_token: other inputs of layers, [tokens, …], by the language model's names.
    """

    embeddings: mx.array
    visual: np.ndarray | None = None
    deep: tuple[mx.array, ...] = ()
    by_token: Mapping[str, mx.array] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.embeddings, *self.deep, *self.by_token.values()))

    def part(self, start: int, stop: int) -> Features:
        """Return the features of the tokens from `start` to `stop`."""
        if (start, stop) == (0, self.embeddings.shape[0]):
            return self
        visual, deep = self.visual, self.deep
        if visual is not None:
            first, last = int(visual[:start].sum()), int(visual[:stop].sum())
            visual, deep = visual[start:stop], tuple(layer[first:last] for layer in deep)
        by_token = {name: array[start:stop] for name, array in self.by_token.items()}
        return Features(self.embeddings[start:stop], visual, deep, by_token)


def encode(model: MultimodalModel, item: MediaItem) -> Features:
    """Run the encoder on an item. Raises UnusualFeaturesError, and what the family raises."""
    features = _features(model, item.encoded or item.whole, item, len(item.whole))
    own = features.part(item.first, item.first + len(item.tokens))
    mx.eval(own.embeddings, own.deep, own.by_token)
    return own


def of_text(model: MultimodalModel, tokens: Sequence[int]) -> Features:
    """Return the embeddings of a piece of text."""
    return _features(model, tokens, None, len(tokens))


def width_of(model: MultimodalModel, item: MediaItem) -> int:
    """Return how many embeddings the encoder returns for the one token that stands for an item."""
    tokens = item.encoded or item.whole
    embeddings: mx.array = outputs(model, tokens, item)["inputs_embeds"]
    return embeddings.shape[1] - len(tokens) + 1


def outputs(
    model: MultimodalModel, tokens: Sequence[int], item: MediaItem | None
) -> dict[str, Any]:
    """What mlx-vlm gives its language part for tokens with an item, by name, without nulls."""
    ids, pixels, rest = mx.array([list(tokens)]), None, dict[str, Any]()
    if item is not None:
        rest = {"mask": mx.ones(ids.shape, dtype=mx.int32), **thawed(item.arrays)}
        pixels = rest.pop("pixel_values", None)
    found = model.embeddings(ids, pixels, rest)
    # Some families return the mask that they were given.
    return {
        name: value
        for name, value in found.items()
        if value is not None and value is not rest.get("mask")
    }


def _features(
    model: MultimodalModel, tokens: Sequence[int], item: MediaItem | None, expected: int
) -> Features:
    given = outputs(model, tokens, item)
    if unusual := sorted(given.keys() - _KNOWN - {model.family.idle}):
        raise UnusualFeaturesError(", ".join(unusual))
    embeddings = given["inputs_embeds"][0]
    if len(embeddings) != expected:
        raise UnusualFeaturesError(f"{len(embeddings)} embeddings for {expected} tokens")
    visual = given.get("visual_pos_masks")
    deep = given.get(_DEEP)
    deep = getattr(deep, "embeddings", deep)  # Cohere Compass stores the mask beside them
    by_token = {"per_layer_inputs": given.get("per_layer_inputs")}
    if isinstance(deep, mx.array) and deep.shape[:2] == (1, len(tokens)):
        # Qwen3-Omni's: [rows, tokens, layers, hidden], with zeros for text.
        by_token[_DEEP], deep = deep, None
    elif isinstance(deep, mx.array) and visual is not None and visual.size == deep.shape[1]:
        # Granite 4 Vision's: [layers, tokens, hidden], with zeros for text.
        deep = deep[:, mx.array(np.flatnonzero(np.array(visual)))]
    return Features(
        embeddings,
        None if visual is None else np.array(visual).reshape(-1).astype(bool),
        () if deep is None else tuple(deep),
        {name: array[0] for name, array in by_token.items() if array is not None},
    )


class _OfMlx(np.ndarray):
    """A NumPy array that was an MLX array."""


def frozen(value: Any) -> Any:
    """Return a processor's output with its MLX arrays as NumPy arrays, bfloat16 as float32."""
    if isinstance(value, mx.array):
        held = value.astype(mx.float32) if value.dtype == mx.bfloat16 else value
        return np.array(held).view(_OfMlx)
    return type(value)(map(frozen, value)) if isinstance(value, list | tuple) else value


def thawed(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reverse of `frozen`: all arrays as MLX arrays, except NumPy's own inside lists."""

    def one(value: Any, kind: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(one(each, _OfMlx) for each in value)
        return mx.array(value) if isinstance(value, kind) else value

    return {name: one(value, np.ndarray) for name, value in arrays.items()}
