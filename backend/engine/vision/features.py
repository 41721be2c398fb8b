"""Computes the features of media items: the embeddings that the language model receives.

Each item is encoded separately, with no other tokens than its placeholders. Its features therefore
depend only on its content, and can be reused in every prompt that contains the item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.errors import Unusable
from backend.engine.vision.media_plan import MediaItem
from backend.engine.vision.multimodal_model import MultimodalModel

# Outputs of mlx-vlm's get_input_embeddings. Positions are ignored, because this package computes
# them for the whole prompt.
_DEEP = "deepstack_visual_embeds"
_KNOWN = {"inputs_embeds", "visual_pos_masks", _DEEP, "per_layer_inputs"}
_KNOWN |= {"position_ids", "rope_deltas"}


@dataclass(frozen=True, slots=True)
class Features:
    """The embeddings of a media item or of a piece of text."""

    embeddings: mx.array  # [tokens, hidden]
    # Booleans, [tokens]; True for tokens to whose hidden states layers add `deep`.
    visual: np.ndarray | None = None
    # For each layer that adds deep features, an array [visual tokens, hidden].
    deep: tuple[mx.array, ...] = ()
    # Other inputs of layers, [tokens, …], by the language model's names.
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


def unusual_features(which: str) -> Unusable:
    """Return the error for a family whose encoder has outputs that are not supported."""
    return Unusable(f"its image features include {which}, which this version does not support")


def encode(model: MultimodalModel, item: MediaItem) -> Features:
    """Run the encoder on an item. Raises Unusable, and what mlx-vlm raises."""
    features = _features(model, item.encoded or item.whole, item, len(item.whole))
    part = features.part(item.first, item.first + len(item.tokens))
    mx.eval(part.embeddings, part.deep, part.by_token)
    return part


def of_text(model: MultimodalModel, tokens: Sequence[int]) -> Features:
    """Return the embeddings of a piece of text."""
    return _features(model, tokens, None, len(tokens))


def width_of(model: MultimodalModel, item: MediaItem) -> int:
    """Return how many embeddings the encoder returns for a single placeholder token."""
    tokens = item.encoded or item.whole
    embeddings: mx.array = outputs(model, tokens, item)["inputs_embeds"]
    return embeddings.shape[1] - len(tokens) + 1


def outputs(
    model: MultimodalModel, tokens: Sequence[int], item: MediaItem | None
) -> dict[str, Any]:
    """Return the inputs of mlx-vlm's language part for tokens with an item, by name."""
    ids, pixels, rest = mx.array([list(tokens)]), None, dict[str, Any]()
    if item is not None:
        rest = {"mask": mx.ones(ids.shape, dtype=mx.int32), **thawed(item.arrays)}
        pixels = rest.pop("pixel_values", None)
    found = model.embeddings(ids, pixels, rest)
    # Some families return the mask from their arguments.
    return {
        name: value
        for name, value in found.items()
        if value is not None and value is not rest.get("mask")
    }


def _features(
    model: MultimodalModel, tokens: Sequence[int], item: MediaItem | None, expected: int
) -> Features:
    found = outputs(model, tokens, item)
    if unusual := sorted(found.keys() - _KNOWN - {model.family.idle}):
        raise unusual_features(", ".join(unusual))
    embeddings = found["inputs_embeds"][0]
    if len(embeddings) != expected:
        raise unusual_features(f"{len(embeddings)} embeddings for {expected} tokens")
    visual = found.get("visual_pos_masks")
    deep = found.get(_DEEP)
    deep = getattr(deep, "embeddings", deep)  # Cohere Compass stores the mask beside them
    by_token = {"per_layer_inputs": found.get("per_layer_inputs")}
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
        readable = value.astype(mx.float32) if value.dtype == mx.bfloat16 else value
        return np.array(readable).view(_OfMlx)
    return type(value)(map(frozen, value)) if isinstance(value, list | tuple) else value


def thawed(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays as MLX arrays. In lists, only arrays that `frozen` has converted change."""

    def convert(value: Any, kind: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(convert(item, _OfMlx) for item in value)
        return mx.array(value) if isinstance(value, kind) else value

    return {name: convert(value, np.ndarray) for name, value in arrays.items()}
