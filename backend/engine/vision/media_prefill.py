"""Prefills a prompt with media, and computes the positions of its tokens.

An item is encoded when the prefill reaches its tokens. Encoding happens in a separate step between
two decode steps, and cannot be split. The prefill of the item's tokens can be split, as with text.

In families with multimodal RoPE, text continues the positions of the item before it, and an item
usually those of the text before it. HunyuanOCR counts the rows and columns of an image from 0, and
MiniCPM-V 4.7 determines the tokens of an image from the tokens around them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.caching import kv
from backend.engine.caching.layer_kv import RowShift
from backend.engine.loading.pass_cost import Attention, noted_attention, score_bytes
from backend.engine.recent import Recent
from backend.engine.vision.features import Features, encode, of_text, outputs, thawed
from backend.engine.vision.media_plan import IMAGE, VIDEO, MediaItem, MediaPlan, Span
from backend.engine.vision.multimodal_model import MultimodalModel

_GRIDS = ("image_grid_thw", "video_grid_thw")
_CANVAS = "minicpmv4_7"
_LARGEST_PATCH = 32  # pixels
_IMAGE, _VIDEO = 1, 2  # the numbers of MiniCPM-V 4.7 for the kinds of tokens


class MediaReader:
    """Encodes media on the engine thread.

    most_bytes: maximum size of the cache of features; 0 turns the cache off.
    """

    def __init__(self, model: MultimodalModel, most_bytes: int) -> None:
        self.model = model
        self.features = Recent[Features](most_bytes)
        # Whether a pass must contain all tokens of an item, or of a prompt.
        self.whole = model.sees_ahead or model.reads_whole
        # The encoder's peak memory: bytes per byte of a prepared item, besides attention scores;
        # bytes of these per pair of tokens, by form; and tokens per byte, by kind of item.
        self._per_byte = 0.0
        self._per_pair: dict[Attention, float] = {}
        self._tokens_per_byte: dict[str, float] = {}
        self.bytes_per_token = 0  # of the features of earlier items

    def begin(
        self, plan: MediaPlan | None, tokens: Sequence[int], cache: Sequence[Any]
    ) -> MediaPrefill | None:
        """Set the fields of a row's cache that depend on its prompt.

        Returns the row's prefill; None if the prompt has no media.
        """
        positions = None
        if self.model.forgets:
            for layer in cache:  # mlx-vlm counts a prompt's last token as part of the answer
                layer.prefill_length = len(tokens) - 1
        if self.model.shifts:
            shift = cache[-1]
            assert isinstance(shift, RowShift)
            shift.shift = 0
            if plan is not None:
                positions = positions_of(self.model, tokens, plan.spans)
                shift.shift = int(positions.max()) + 1 - len(tokens)
        return None if plan is None else MediaPrefill(self, plan, tokens, positions)

    def features_of(self, span: Span) -> tuple[Features, bool]:
        """Return the features of an item, and whether they had to be computed."""
        known = self.features.get(span.item.digest)
        if known is not None:
            return known, False
        features = self.encode(span.item)
        self.features.put(span.item.digest, features, features.nbytes)
        return features, True

    def encode(self, item: MediaItem) -> Features:
        """Compute the features of an item, and measure how much memory the encoder needs."""
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with noted_attention() as attention:
            features = encode(self.model, item)
        peak = mx.get_peak_memory() - before
        for form in attention if (parts := parts_of(item)) else ():
            tokens = form.columns * parts / max(item.nbytes, 1)
            known = self._tokens_per_byte.get(item.kind, 0.0)
            self._tokens_per_byte[item.kind] = max(known, tokens)
            if (own := form._replace(columns=0)) not in self._per_pair:
                self._per_pair[own] = score_bytes(own)
        own_bytes = math.ceil(features.nbytes / max(len(item.tokens), 1))
        self.bytes_per_token = max(self.bytes_per_token, own_bytes)
        needed = peak - self._score_bytes(item)
        self._per_byte = max(self._per_byte, needed / max(item.nbytes, 1))
        return features

    def _score_bytes(self, item: MediaItem) -> float:
        """Return the bytes of attention scores; those of all tiles or frames may exist at once.

        Returns 0 for items of which it is not known what attends to what.
        """
        parts = parts_of(item)
        tokens = self._tokens_per_byte.get(item.kind, 0.0) * item.nbytes
        most = max(self._per_pair.values(), default=0.0)
        return most * tokens**2 / parts if parts else 0.0

    def needs(self, plan: MediaPlan) -> int:
        """Return the peak bytes of encoding a plan's largest item, estimated from earlier items."""
        items = [span.item for span in plan.spans]
        needed = (self._per_byte * item.nbytes + self._score_bytes(item) for item in items)
        return math.ceil(max(needed, default=0))

    def reference(self, tokens: Sequence[int], item: MediaItem | None, prompt: int) -> mx.array:
        """Return the logits, [tokens, vocabulary], of mlx-vlm's forward pass over a sequence.

        item: the item at the beginning of `tokens`; None if all tokens are text.
        prompt: how many of the tokens are the prompt. This matters only if the prompt's tokens
            attend to later tokens.
        """
        model = self.model
        encoded = item.encoded if item is not None else ()
        ids = [*encoded, *tokens[len(item.whole) :]] if item and encoded else list(tokens)
        arguments = outputs(model, ids, item)
        if item is not None:
            arguments |= grids_of(item)
        if model.passes_positions:
            spans = [] if item is None else [Span(item.first, item)]
            arguments["position_ids"] = mx.array(positions_of(model, tokens, spans))[:, None]
        if model.reads_whole:
            at = mx.arange(len(tokens))
            arguments["mask"] = ((at <= at[:, None]) | (at < prompt))[None, None]
        cache = [layer for layer in kv.new_row(model) if not isinstance(layer, RowShift)]
        inputs = mx.array([ids])
        arguments |= model.given_by_token(inputs)
        answer = model.language_model(inputs, cache=cache, **arguments)
        logits: mx.array = getattr(answer, "logits", answer)
        return logits[0]


@dataclass(eq=False)
class MediaPrefill:
    """The prefill of one row."""

    reader: MediaReader
    plan: MediaPlan
    tokens: Sequence[int]
    positions: np.ndarray | None  # [axes, tokens]; None for a model without `shifts`
    _features: dict[int, Features] = field(default_factory=dict, init=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the features that this row still needs and that are not in the cache."""
        cached = self.reader.features
        return sum(part.nbytes for part in self._features.values() if not cached.has(part))

    def uncut(self, start: int, end: int) -> int:
        """Return `end`, or where a chunk must end instead so that the pass contains whole items."""
        cut = next((span for span in self.plan.spans if span.start < end < span.stop), None)
        if cut is None or not self.reader.whole:
            return end
        return cut.start if cut.start > start else cut.stop

    def get_features(self, start: int, stop: int) -> int:
        """Get the features for a chunk, and encode at most one item.

        Returns the number of tokens of the encoded item. Callers call this method once per step,
        until it returns 0.
        """
        for span in self._within(start, stop):
            if span.start not in self._features:
                self._features[span.start], computed = self.reader.features_of(span)
                if computed:
                    return len(span.item.tokens)
        return 0

    def run(self, start: int, stop: int, cache: list[Any]) -> mx.array:
        """Run a chunk whose `get_features` has returned 0, and return its logits."""
        model = self.reader.model
        chunk = _joined(self._pieces(start, stop))
        features: dict[str, Any] = {"inputs_embeds": chunk.embeddings[None]}
        if chunk.visual is not None and chunk.visual.any():
            features["visual_pos_masks"] = mx.array(chunk.visual)[None]
            if chunk.deep:
                features["deepstack_visual_embeds"] = list(chunk.deep)
        features |= {name: array[None] for name, array in chunk.by_token.items()}
        if self.positions is not None:
            features["position_ids"] = mx.array(self.positions[:, None, start:stop])
        logits = model(mx.array([list(self.tokens[start:stop])]), cache=cache, **features)
        for span in self.plan.spans:
            if span.stop <= stop:
                self._features.pop(span.start, None)
        return logits

    def _pieces(self, start: int, stop: int) -> list[Features]:
        pieces: list[Features] = []
        at = start
        for span in self._within(start, stop):
            if at < span.start:
                pieces.append(of_text(self.reader.model, self.tokens[at : span.start]))
            first, at = max(start, span.start), min(stop, span.stop)
            item = self._features[span.start]
            pieces.append(item.part(first - span.start, at - span.start))
        if at < stop:
            pieces.append(of_text(self.reader.model, self.tokens[at:stop]))
        return pieces

    def _within(self, start: int, stop: int) -> list[Span]:
        return [span for span in self.plan.spans if span.start < stop and span.stop > start]


def _joined(pieces: Sequence[Features]) -> Features:
    if len(pieces) == 1:
        return pieces[0]
    seen = [
        np.zeros(len(piece.embeddings), bool) if piece.visual is None else piece.visual
        for piece in pieces
    ]
    deep = (piece.deep for piece in pieces if piece.deep)
    return Features(
        mx.concatenate([piece.embeddings for piece in pieces]),
        np.concatenate(seen),
        tuple(mx.concatenate(list(layer)) for layer in zip(*deep, strict=True)),
        {
            name: mx.concatenate([piece.by_token[name] for piece in pieces])
            for name in pieces[0].by_token
        },
    )


def parts_of(item: MediaItem) -> int:
    """Return the number of frames or tiles of an item, each of which attends only to itself.

    Returns 0 if the item's arrays do not show it.
    """
    for name in _GRIDS:
        if name in item.arrays:
            return int(np.reshape(item.arrays[name], (-1, 3))[:, 0].sum())
    pixels = item.arrays.get("pixel_values")
    if not isinstance(pixels, np.ndarray) or pixels.ndim < 4:
        return 0
    patches = max(pixels.shape[-2:]) <= _LARGEST_PATCH  # which all attend to each other
    return 1 if patches else math.prod(pixels.shape[:-3])


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
    """Return the positions of an item's tokens, [axes, tokens]."""
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
