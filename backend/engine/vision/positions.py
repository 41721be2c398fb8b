"""Computes the positions of a prompt's tokens, for families with multimodal RoPE.

Text continues the positions of the item before it. In most families, an item continues the
positions of the text before it. HunyuanOCR counts the rows and columns of an image from 0, and
MiniCPM-V 4.7 determines the tokens of an image from the tokens around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.vision.features import thawed
from backend.engine.vision.media_plan import IMAGE, VIDEO, MediaItem, Span
from backend.engine.vision.multimodal_model import MultimodalModel

_GRIDS = ("image_grid_thw", "video_grid_thw")
_CANVAS = "minicpmv4_7"
_IMAGE, _VIDEO = 1, 2  # the numbers of MiniCPM-V 4.7 for the kinds of tokens


def positions_of(
    model: MultimodalModel, tokens: Sequence[int], spans: Sequence[Span]
) -> np.ndarray:
    """Return the positions of a prompt's tokens, [axes, tokens]; only for models with `shifts`."""
    if model.model_type == _CANVAS:
        return _on_canvas(model.whole.config, tokens, spans)
    positions = np.empty((model.axes, len(tokens)), dtype=np.int32)
    at = following = 0
    for span in spans:
        text = span.start - at
        in_item = _of_item(model, span.item, following + text)
        positions[:, at : span.start] = following + np.arange(text)
        positions[:, span.start : span.stop] = in_item
        following = int(in_item.max()) + 1
        at = span.stop
    positions[:, at:] = following + np.arange(len(tokens) - at)
    return positions


def _of_item(model: MultimodalModel, item: MediaItem, first: int) -> np.ndarray:
    """Return the positions of an item's tokens, [axes, tokens].

    first: the position of the first token.
    """
    if (stated := item.arrays.get("position_ids")) is not None:
        # HunyuanOCR's processor computes them. Outside the image's grid, the position of a token is
        # its index in `item.whole`, on all axes. Only these positions are shifted.
        whole = stated[0].astype(np.int32)
        in_grid = whole != np.arange(whole.shape[1])
        prompt_part = slice(item.first, item.first + item.count)
        shifted: np.ndarray = np.where(in_grid, whole, whole + first - item.first)[:, prompt_part]
        return shifted
    count = len(item.tokens)
    grids = grids_of(item)
    if not grids:  # the family counts positions in images as in text
        return np.broadcast_to(first + np.arange(count), (model.axes, count))
    positions, _ = model.language_model.get_rope_index(mx.array([item.tokens]), **grids)
    found = np.array(model.axes_first(positions)).reshape(-1, count)
    return first + np.broadcast_to(found, (model.axes, count))


def grids_of(item: MediaItem) -> dict[str, mx.array]:
    """Return the numbers of an item's patches in time, height and width, by name."""
    return thawed({name: item.arrays[name] for name in _GRIDS if name in item.arrays})


def _on_canvas(config: Any, tokens: Sequence[int], spans: Sequence[Span]) -> np.ndarray:
    from mlx_vlm.models.minicpmv4_7.rope import CanvasRoPE

    ids = np.array([tokens])
    kinds = np.where(ids == config.image_token_id, _IMAGE, 0)
    kinds = np.where(ids == config.video_token_id, _VIDEO, kinds)
    sizes: dict[str, list[np.ndarray]] = {IMAGE: [np.empty((0, 2), np.int32)]}
    sizes[VIDEO] = list(sizes[IMAGE])
    for span in spans:
        found: Any = span.item.arrays["tgt_sizes"]
        listed = found if isinstance(found, list | tuple) else [found]
        sizes[span.item.kind] += [np.reshape(size, (-1, 2)) for size in listed]
    mode = next((span.item.arrays.get("downsample_mode") for span in spans), None)
    positions, _ = CanvasRoPE(config).get_rope_index(
        ids,
        mm_token_type_ids=kinds,
        target_sizes=np.concatenate(sizes[IMAGE]),
        target_sizes_videos=np.concatenate(sizes[VIDEO]),
        downsample_mode=mode,
    )
    return np.asarray(positions)[:, 0]
