"""The frozen vision tower of the tiny vision model, and its features of a gallery of pictures.

The tower keeps its random weights: random features of a flat colour are as good as trained ones.
Only the last layer of each merger is set, so that features are centred and as large as embeddings
are. Since the tower never learns, the features of every picture are computed once, before training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from tests.models.tiny_vision_tasks import COLOURS, paint

_PER_COLOUR = 80
_DEEP_SHARE = 0.5


@dataclass(frozen=True)
class Gallery:
    """Pictures as features. Row 0 of both tables is zero: a place without a picture.

    `features` and `deep` have the shape (1 + tokens of all pictures, hidden); picture i has the
    rows from `starts[i]`, one for each cell of `grids[i]` (rows, columns) in reading order.
    """

    colours: list[str]
    grids: list[tuple[int, int]]
    starts: list[int]
    features: mx.array
    deep: mx.array

    def size(self, picture: int) -> int:
        rows, columns = self.grids[picture]
        return rows * columns


def _seen(model: Any, processor: Any, images: list[Any]) -> Iterator[tuple[Any, mx.array, Any]]:
    for image in images:
        inputs = processor.image_processor([image])
        grid = mx.array(np.array(inputs["image_grid_thw"]))
        features, deep = model.vision_tower(mx.array(np.array(inputs["pixel_values"])), grid)
        mx.eval(features, deep)
        yield inputs["image_grid_thw"][0], features, deep[0]


def _settle(layer: Any, outputs: mx.array, size: float) -> None:
    """Centre the outputs of a layer and bring their root mean square to `size`."""
    middle = mx.mean(outputs, axis=0)
    factor = size / mx.sqrt(mx.mean(mx.square(outputs - middle)))
    layer.weight = layer.weight * factor
    layer.bias = (layer.bias - middle) * factor


def paintings(rng: random.Random) -> list[tuple[str, Any]]:
    """Pairs of a colour's name and an image; each colour equally often, in many sizes."""
    made = []
    for colour in COLOURS:
        for _ in range(_PER_COLOUR):
            width = rng.randint(24, 160)
            height = min(160, round(width * rng.uniform(0.4, 2.5)))
            made.append((colour, paint(rng, colour, width, height)))
    return made


def settle(model: Any, processor: Any, images: list[Any]) -> None:
    """Fix the random vision tower before training.

    The last layer of each merger is changed so that its outputs for `images` are centred and have
    the size of embeddings. The tower is rounded to bfloat16, as in the checkpoint: training then
    uses the features that a server will compute.
    """
    tower = model.vision_tower
    weight = model.language_model.model.embed_tokens.weight
    size = float(mx.sqrt(mx.mean(mx.square(weight))))
    seen = list(_seen(model, processor, images))
    _settle(tower.merger.linear_fc2, mx.concatenate([f for _, f, _ in seen]), size)
    deep_merger = tower.deepstack_merger_list[0]
    _settle(deep_merger.linear_fc2, mx.concatenate([d for _, _, d in seen]), size * _DEEP_SHARE)
    tower.update(tree_map(lambda w: w.astype(mx.bfloat16).astype(mx.float32), tower.parameters()))


def features_of(model: Any, processor: Any, painted: list[tuple[str, Any]]) -> Gallery:
    """Compute the features of every picture once."""
    colours = [colour for colour, _ in painted]
    images = [image for _, image in painted]
    grids, starts, features, deep, used = [], [], [], [], 1
    for (_, rows, columns), feature, deep_feature in _seen(model, processor, images):
        grids.append((rows // 2, columns // 2))
        starts.append(used)
        features.append(feature)
        deep.append(deep_feature)
        used += len(feature)
    nothing = mx.zeros((1, features[0].shape[1]))
    gallery = Gallery(
        colours,
        grids,
        starts,
        mx.concatenate([nothing, *features]),
        mx.concatenate([nothing, *deep]),
    )
    mx.eval(gallery.features, gallery.deep)
    return gallery
