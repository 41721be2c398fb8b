"""The features of images, videos and sounds: the embeddings that the language model receives.

Each item is encoded on its own, with its placeholder tokens and no others, so its features depend
only on its content and can be reused in every prompt that contains it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.vision.media_plan import MediaItem
from backend.engine.vision.multimodal_model import MultimodalModel, accepted

# Outputs of mlx-vlm's get_input_embeddings. Positions are ignored: they are computed for the whole
# prompt instead.
_READ = {"inputs_embeds", "visual_pos_masks", "deepstack_visual_embeds", "per_layer_inputs"}
_RECOMPUTED = {"position_ids", "rope_deltas"}
# Gemma 3 returns this mask, but mlx-vlm's own generation does not use it either.
_IDLE = {"gemma3": {"attention_mask_4d"}}
_GRIDS = ("image_grid_thw", "video_grid_thw")


class UnusualFeaturesError(Exception):
    """The family's features have outputs that are not supported; the argument names them."""


@dataclass(frozen=True, slots=True)
class Features:
    """Embeddings of tokens: of an item, or of a stretch of text.

    embeddings: [tokens, hidden]. visual: [tokens] bool, the tokens to which `deep` is added. deep:
    for each such layer, an array [visual tokens, hidden]. per_layer: [tokens, …], or None.
    """

    embeddings: mx.array
    visual: np.ndarray | None = None
    deep: tuple[mx.array, ...] = ()
    per_layer: mx.array | None = None

    @property
    def nbytes(self) -> int:
        arrays = [self.embeddings, *self.deep]
        return sum(array.nbytes for array in arrays) + (
            0 if self.per_layer is None else self.per_layer.nbytes
        )

    def part(self, start: int, stop: int) -> Features:
        """The features of the tokens from `start` to `stop`."""
        if (start, stop) == (0, self.embeddings.shape[0]):
            return self
        visual, deep = self.visual, self.deep
        if visual is not None:
            first, last = int(visual[:start].sum()), int(visual[:stop].sum())
            visual, deep = visual[start:stop], tuple(layer[first:last] for layer in deep)
        per_layer = None if self.per_layer is None else self.per_layer[start:stop]
        return Features(self.embeddings[start:stop], visual, deep, per_layer)


def encode(model: MultimodalModel, item: MediaItem) -> Features:
    """Run the encoder on an item. Raises UnusualFeaturesError, and what the family raises."""
    arrays = thawed(item.arrays)
    pixels = arrays.pop("pixel_values", None)
    mask = mx.ones((1, len(item.whole)), dtype=mx.int32)
    features = _features(model, item.whole, pixels, {"mask": mask, **arrays})
    own = features.part(item.first, item.first + len(item.tokens))
    mx.eval(own.embeddings, own.deep, own.per_layer)
    return own


def of_text(model: MultimodalModel, tokens: Sequence[int]) -> Features:
    """The embeddings of a stretch of text."""
    return _features(model, tokens, None, {})


def positions_of(model: MultimodalModel, item: MediaItem) -> np.ndarray:
    """The positions of an item's tokens, from 0 on, [3, tokens]; only for models with `shifts`."""
    arrays = thawed({name: item.arrays[name] for name in _GRIDS if name in item.arrays})
    if not arrays:  # the family gives images sequential positions, as text has
        return np.broadcast_to(np.arange(len(item.tokens)), (3, len(item.tokens)))
    positions, _ = model.language_model.get_rope_index(mx.array([item.tokens]), **arrays)
    found = np.array(positions).reshape(-1, len(item.tokens))
    return np.broadcast_to(found, (3, len(item.tokens)))


def _features(
    model: MultimodalModel, tokens: Sequence[int], pixels: Any, rest: Mapping[str, Any]
) -> Features:
    whole = model.whole
    embed = whole.get_input_embeddings
    output = embed(mx.array([list(tokens)]), pixels, **accepted(embed, rest)).to_dict()
    given = {name: value for name, value in output.items() if value is not None}
    idle = _IDLE.get(str(getattr(whole.config, "model_type", "")), set())
    if unusual := sorted(given.keys() - _READ - _RECOMPUTED - idle):
        raise UnusualFeaturesError(", ".join(unusual))
    embeddings = given["inputs_embeds"][0]
    if len(embeddings) != len(tokens):
        raise UnusualFeaturesError(f"{len(embeddings)} embeddings for {len(tokens)} tokens")
    visual = given.get("visual_pos_masks")
    deep = given.get("deepstack_visual_embeds")
    per_layer = given.get("per_layer_inputs")
    return Features(
        embeddings,
        None if visual is None else np.array(visual).reshape(-1).astype(bool),
        () if deep is None else tuple(deep),
        None if per_layer is None else per_layer[0],
    )


def frozen(value: Any) -> Any:
    """A processor's output with its MLX arrays as NumPy arrays."""
    if isinstance(value, mx.array):
        return np.array(value)
    if isinstance(value, list | tuple):
        return type(value)(map(frozen, value))
    return value


def thawed(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `frozen`: NumPy arrays as MLX arrays. Lists stay as they are."""
    return {
        name: mx.array(value) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }


class FeatureCache:
    """An LRU cache of features by the digest of their content, limited in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[bytes, Features] = OrderedDict()
        self.nbytes = 0

    def find(self, digest: bytes) -> Features | None:
        features = self._held.get(digest)
        if features is not None:
            self._held.move_to_end(digest)
        return features

    def store(self, digest: bytes, features: Features) -> None:
        if digest in self._held or features.nbytes > self._max_bytes:
            return
        self._held[digest] = features
        self.nbytes += features.nbytes
        self.shrink(self._max_bytes)

    def holds(self, features: Features) -> bool:
        return any(held is features for held in self._held.values())

    def shrink(self, most: int) -> None:
        """Drop the least recently used features until at most `most` bytes are left."""
        while self.nbytes > most:
            _, dropped = self._held.popitem(last=False)
            self.nbytes -= dropped.nbytes

    def clear(self) -> None:
        self._held.clear()
        self.nbytes = 0
