"""Reads from a checkpoint how the vectors of a text's tokens are pooled to one vector.

Checkpoints of sentence-transformers list their steps in modules.json, and describe pooling in a
separate folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from backend.engine.embedding.kind import FAMILIES, is_causal
from backend.engine.embedding.sentence_files import SentenceFiles, truncated_size
from backend.engine.embedding.task_adapters import is_jina_v4
from backend.engine.errors import Unusable
from backend.engine.settings import Settings
from common.model_kind import ModelKind
from common.wording import shown

Mode = Literal["cls", "mean", "max", "last", "weighted_mean", "mean_sqrt_len", "none"]

# Names in sentence-transformers 5, and flags in earlier versions (without `pooling_mode_`) → modes.
# The vectors of several flags are joined in the order of this table.
_MODES: Mapping[tuple[str, str], Mode] = {
    ("cls", "cls_token"): "cls",
    ("max", "max_tokens"): "max",
    ("mean", "mean_tokens"): "mean",
    ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens"): "mean_sqrt_len",
    ("weightedmean", "weightedmean_tokens"): "weighted_mean",
    ("lasttoken", "lasttoken"): "last",
}
# The modes of checkpoints that state none; `mean` for other families. In a causal model, it is
# `last`, because only the last token attends to the whole text.
_FAMILY: Mapping[str, Mode] = {"lfm2": "cls", "new": "cls", "gte": "cls"}


@dataclass(frozen=True, slots=True)
class PoolingRule:
    """How the vectors of a text's tokens become the answer."""

    # Poolings whose vectors are joined; `none` returns the vectors of all tokens.
    modes: tuple[Mode, ...]
    normalize: bool  # whether each vector is scaled to length 1
    dimensions: int | None = None  # how many numbers of each vector are returned; None means all

    @property
    def per_token(self) -> bool:
        """Whether the result is a vector for each token."""
        return self.modes == ("none",)


def pooling_of_text_model(settings: Settings) -> PoolingRule:
    """Return the rule for a generative model: by default, the last token, scaled to length 1."""
    return _overridden(PoolingRule(("last",), True), settings)


def pooling_of_checkpoint(
    files: SentenceFiles, config: Mapping[str, Any], settings: Settings
) -> PoolingRule:
    """Return the rule of an embedding checkpoint, overridden by the user's options.

    Raises Unusable for steps that are not supported.
    """
    # The code of jina-embeddings-v4 pools and scales in its first step.
    pools_itself, model_type = is_jina_v4(config), str(config["model_type"])
    generates = model_type not in FAMILIES[ModelKind.EMBEDDING] and is_causal(config)
    family: Mode = "last" if generates and not pools_itself else _FAMILY.get(model_type, "mean")
    if (steps := files.steps) is None:
        return _overridden(PoolingRule(_modes(files, "1_Pooling") or (family,), True), settings)
    if files.late_interaction:
        if settings.pooling != "none":
            raise Unusable(
                "it is a late-interaction model (ColBERT), which returns a vector for each token:"
                " set the option pooling:none to get these"
            )
        return PoolingRule(("none",), normalize=settings.normalize is not False)
    modes: tuple[Mode, ...] = (family,)
    normalize, pooled = pools_itself, False
    for kind, folder in steps:
        if kind == "Pooling":
            found = _modes(files, folder)
            if found is None and not settings.pooling:
                raise _unpooled(f"{folder}/config.json, which its modules.json names")
            modes = found or modes
        elif kind == "Normalize":
            normalize = True
        elif kind in ("Dense", "LayerNorm"):
            normalize = False
        elif kind == "SpladePooling":
            raise Unusable(
                "its vectors are sparse (the step SpladePooling in its modules.json), which is not"
                " supported: load a model with dense vectors"
            )
        elif kind not in ("Transformer", "StaticEmbedding", "Dropout"):
            raise Unusable(f"the step {shown(kind)} in its modules.json is not supported")
        pooled = pooled or kind in ("Pooling", "StaticEmbedding")
    if not (pooled or pools_itself or settings.pooling):
        raise _unpooled("the step Pooling in modules.json")
    return _overridden(PoolingRule(modes, normalize, truncated_size(files)), settings)


def _unpooled(missing: str) -> Unusable:
    return Unusable(
        f"it lacks {missing}, so how its vectors are pooled is unknown: copy the file from the"
        " model that it was made from, or set the option pooling"
    )


def _overridden(rule: PoolingRule, settings: Settings) -> PoolingRule:
    """Return the rule with the options `pooling` and `normalize` applied.

    Vectors of tokens are not normalised by default, because hosts pool and normalise them.
    """
    if settings.pooling:
        rule = replace(rule, modes=(cast(Mode, settings.pooling),))
    normalize = rule.normalize and not rule.per_token
    return replace(rule, normalize=normalize if settings.normalize is None else settings.normalize)


def _modes(files: SentenceFiles, folder: str) -> tuple[Mode, ...] | None:
    """Return the modes in a Pooling step's configuration; None if there is no configuration."""
    stated = files.value(f"{folder}/config.json")
    if not isinstance(stated, dict):
        return None
    named = stated.get("pooling_mode")
    if named is None:
        flags = (mode for (_, flag), mode in _MODES.items() if stated.get(f"pooling_mode_{flag}"))
        return tuple(flags) or ("mean",)
    modes = {name: mode for (name, _), mode in _MODES.items()}
    names = named if isinstance(named, list) else [named]
    for name in names:
        if not isinstance(name, str) or name not in modes:
            raise Unusable(f"its pooling {shown(name)} is not supported")
    return tuple(modes[name] for name in names) or ("mean",)
