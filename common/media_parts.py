"""Recognises the vision and audio parts of a model by the names of its weights."""

from __future__ import annotations

from collections.abc import Collection

_VISION = frozenset({
    "vision_tower", "vision_model", "vision_encoder", "vision_embedder", "vision_adapter",
    "vision_projection", "vision_backbone", "vision_embed_tokens", "vision", "vit", "visual",
    "embed_vision", "vpm", "resampler",
})  # fmt: skip
_AUDIO = frozenset({"audio_tower", "audio_model", "audio_encoder", "embed_audio", "apm"})
_EITHER = frozenset({"multi_modal_projector", "mm_projector"})


def has_vision(tensors: Collection[str]) -> bool:
    """Return whether weights of a vision part are among the tensors."""
    return _has(tensors, _VISION)


def has_audio(tensors: Collection[str]) -> bool:
    """Return whether weights of an audio part are among the tensors."""
    return _has(tensors, _AUDIO)


def has_media(tensors: Collection[str]) -> bool:
    """Return whether weights of a vision or audio part are among the tensors."""
    return _has(tensors, _VISION | _AUDIO | _EITHER)


def _has(tensors: Collection[str], parts: frozenset[str]) -> bool:
    return any(not parts.isdisjoint(name.split(".")) for name in tensors)
