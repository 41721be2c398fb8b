"""The prefill of a prompt with media: features first, an item a step, then chunks like any other.

An item is encoded when the chunk at hand reaches it. That is a step of its own between two decode
steps, which cannot be cut; what is cut is the reading of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.row_shift import RowShift
from backend.engine.vision.features import FeatureCache, Features, encode, of_text, positions_of
from backend.engine.vision.media_plan import MediaItem, MediaPlan, Span
from backend.engine.vision.seeing_model import SeeingModel


class MediaReader:
    """The engine thread's half of what sees and hears.

    most_bytes: of features of earlier items; 0 remembers none.
    """

    def __init__(self, model: SeeingModel, most_bytes: int) -> None:
        self.model = model
        self.features = FeatureCache(most_bytes)
        self._per_byte = 0.0  # of an item: what the encoder computed with at most

    def begin(
        self, plan: MediaPlan | None, tokens: Sequence[int], cache: Sequence[Any]
    ) -> MediaPrefill | None:
        """Give a row's cache its own shift; what prefills the row, where it has media."""
        positions = None
        if self.model.shifts:
            shift = cache[-1]
            assert isinstance(shift, RowShift)
            shift.shift = 0
            if plan is not None:
                positions = _positions(len(tokens), [
                    (span, positions_of(self.model, span.item)) for span in plan.spans
                ])  # fmt: skip
                shift.shift = int(positions.max()) + 1 - len(tokens)
        return None if plan is None else MediaPrefill(self, plan, tokens, positions)

    def look(self, span: Span) -> tuple[Features, bool]:
        """The features of an item, and whether they had to be computed."""
        known = self.features.find(span.item.digest)
        if known is not None:
            return known, False
        features = self.encode(span.item)
        self.features.store(span.item.digest, features)
        return features, True

    def encode(self, item: MediaItem) -> Features:
        """The features of an item, computed; learns what that takes."""
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        features = encode(self.model, item)
        taken = max(mx.get_peak_memory() - before, 0)
        self._per_byte = max(self._per_byte, taken / max(item.nbytes, 1))
        return features

    def needs(self, plan: MediaPlan) -> int:
        """Bytes that the encoder will compute with for the largest item, by what others took."""
        return math.ceil(self._per_byte * max((span.item.nbytes for span in plan.spans), default=0))


class MediaPrefill:
    """One row on its way through the prompt. positions: [3, tokens], where the model shifts."""

    def __init__(
        self,
        reader: MediaReader,
        plan: MediaPlan,
        tokens: Sequence[int],
        positions: np.ndarray | None,
    ) -> None:
        self._reader = reader
        self._plan = plan
        self._tokens = tokens
        self._positions = positions
        self._features: dict[int, Features] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the features that wait for their pass and that nobody else remembers."""
        remembered = self._reader.features
        return sum(own.nbytes for own in self._features.values() if not remembered.holds(own))

    def look(self, start: int, stop: int) -> int:
        """Get what the chunk needs; how many tokens were encoded for it, of one item at most."""
        for span in self._within(start, stop):
            if span.start not in self._features:
                self._features[span.start], computed = self._reader.look(span)
                if computed:
                    return len(span.item.tokens)
        return 0

    def run(self, start: int, stop: int, cache: list[Any]) -> mx.array:
        """Logits of the chunk, whose media have been looked at."""
        model = self._reader.model
        chunk = _joined(self._pieces(start, stop))
        features: dict[str, Any] = {"inputs_embeds": chunk.embeddings[None]}
        if chunk.visual is not None and chunk.visual.any():
            features["visual_pos_masks"] = mx.array(chunk.visual)[None]
            if chunk.deep:
                features["deepstack_visual_embeds"] = list(chunk.deep)
        features |= {name: array[None] for name, array in chunk.by_token.items()}
        if self._positions is not None:
            features["position_ids"] = mx.array(self._positions[:, None, start:stop])
        logits = model(mx.array([list(self._tokens[start:stop])]), cache=cache, **features)
        for span in self._plan.spans:
            if span.stop <= stop:
                self._features.pop(span.start, None)
        return logits

    def _pieces(self, start: int, stop: int) -> list[Features]:
        pieces: list[Features] = []
        at = start
        for span in self._within(start, stop):
            if at < span.start:
                pieces.append(of_text(self._reader.model, self._tokens[at : span.start]))
            first, at = max(start, span.start), min(stop, span.stop)
            item = self._features[span.start]
            pieces.append(item.part(first - span.start, at - span.start))
        if at < stop:
            pieces.append(of_text(self._reader.model, self._tokens[at:stop]))
        return pieces

    def _within(self, start: int, stop: int) -> list[Span]:
        return [span for span in self._plan.spans if span.start < stop and span.stop > start]


def _joined(pieces: Sequence[Features]) -> Features:
    if len(pieces) == 1:
        return pieces[0]
    visual = None
    if any(piece.visual is not None for piece in pieces):
        visual = np.concatenate(
            [
                np.zeros(len(piece.embeddings), bool) if piece.visual is None else piece.visual
                for piece in pieces
            ]
        )
    deep = [piece.deep for piece in pieces if piece.deep]
    layers = tuple(mx.concatenate(list(layer)) for layer in zip(*deep, strict=True))
    return Features(
        mx.concatenate([piece.embeddings for piece in pieces]),
        visual,
        layers,
        {
            name: mx.concatenate([piece.by_token[name] for piece in pieces])
            for name in pieces[0].by_token
        },
    )


def _positions(tokens: int, items: Sequence[tuple[Span, np.ndarray]]) -> np.ndarray:
    """[3, tokens]: each item's own positions, moved to where the text before it ends."""
    positions = np.empty((3, tokens), dtype=np.int32)
    at = following = 0
    for span, own in items:
        text = span.start - at
        positions[:, at : span.start] = following + np.arange(text)
        following += text
        positions[:, span.start : span.stop] = following + own
        following += int(own.max()) + 1
        at = span.stop
    positions[:, at:] = following + np.arange(tokens - at)
    return positions
