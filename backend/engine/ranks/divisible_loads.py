"""Refuses loads that ranks do not support, before any rank reads weights."""

from __future__ import annotations

from backend.engine.errors import InvalidRequest, ModelRejected
from backend.engine.loading.load_order import LoadOrder
from common.field_names import named
from common.model_kind import ModelKind


def require_divisible(order: LoadOrder) -> None:
    """Raise InvalidRequest or ModelRejected if several ranks cannot serve this load."""
    checkpoint, settings, request = order.checkpoint, order.settings, order.request
    if checkpoint.kind is not ModelKind.TEXT or request.embeddings or request.reranking:
        raise ModelRejected.because(
            checkpoint.name,
            "only models that generate text are divided among ranks: serve it with one rank",
        )
    if checkpoint.of_vlm:
        raise ModelRejected.because(
            checkpoint.name,
            "models that mlx-vlm builds are not divided among ranks; to serve the text part of"
            " one that mlx-lm knows, set the option type:text",
        )
    for given, words in (
        (order.adapters, f"{named('LoraAdapter')} is set, but adapters are not applied"),
        (order.choices, "option adapters is set, but adapters are not applied"),
        (order.draft, f"{named('DraftModel')} is set, but no tokens are drafted"),
        (settings.prompt_lookup, "prompt_lookup is set, but no tokens are drafted"),
        (settings.mtp, "mtp is set, but no tokens are drafted"),
        (settings.expert_cache_mib, "expert_cache_mib is set, but all experts are in memory"),
        (settings.prompt_cache_dir, "prompt_cache_dir is set, but no KV is stored on disk"),
    ):
        if given:
            raise InvalidRequest(
                f"{words} where ranks divide the model: leave it out, or serve it with one rank"
            )
