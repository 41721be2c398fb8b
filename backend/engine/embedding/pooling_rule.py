"""How the vectors of a text's tokens are pooled to one vector, as the checkpoint states it.

Sentence-transformers checkpoints list their steps in modules.json and describe pooling in a
separate folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from backend.engine.embedding.kind import FAMILIES, is_causal
from backend.engine.embedding.sentence_files import SentenceFiles
from backend.engine.embedding.task_adapters import is_jina_v4
from backend.engine.errors import ModelRejected
from backend.engine.settings import Settings
from common.model_kind import ModelKind
from common.wording import shown

Mode = Literal["cls", "mean", "max", "last", "weighted_mean", "mean_sqrt_len", "none"]

# The names in sentence-transformers (flags before version 5, names since) → ours. Of several flags,
# the poolings follow one another in this order.
_FLAGS: Mapping[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES: Mapping[str, Mode] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
# For checkpoints without a rule. In a causal model, only the last token attends to the whole text.
_FAMILY: Mapping[str, Mode] = {"lfm2": "cls", "new": "cls", "gte": "cls"}


@dataclass(frozen=True, slots=True)
class PoolingRule:
    """modes: poolings whose vectors follow one another; `none` keeps the vectors of the tokens.

    normalize: whether to scale each vector to length 1.
    """

    modes: tuple[Mode, ...]
    normalize: bool

    @property
    def per_token(self) -> bool:
        """Whether the result is a vector for each token."""
        return self.modes == ("none",)


def pooling_of_text_model(settings: Settings) -> PoolingRule:
    """The rule for a generative model: by default, the last token, scaled to length 1."""
    return _overridden(PoolingRule(("last",), True), settings)


def pooling_of_checkpoint(
    files: SentenceFiles, config: Mapping[str, Any], settings: Settings
) -> PoolingRule:
    """The rule of an embedding checkpoint, overridden by the user's options.

    Raises ModelRejected for steps that are not supported.
    """
    # The code of jina-embeddings-v4 pools and scales in its first step.
    own, model_type = is_jina_v4(config), str(config["model_type"])
    generates = model_type not in FAMILIES[ModelKind.EMBEDDING] and is_causal(config)
    family: Mode = "last" if generates and not own else _FAMILY.get(model_type, "mean")
    if (steps := files.steps) is None:
        return _overridden(PoolingRule(_modes(files, "1_Pooling") or (family,), True), settings)
    modes: tuple[Mode, ...] = (family,)
    normalize, pooled = own, False
    for kind, folder in steps:
        if kind == "Pooling":
            found = _modes(files, folder)
            if found is None and not settings.pooling:
                raise _unpooled(files, f"{folder}/config.json, which its modules.json names")
            modes = found or modes
        elif kind == "Normalize":
            normalize = True
        elif kind not in ("Transformer", "Dense"):
            raise files.rejected(f"the step {shown(kind)} in its modules.json is not supported")
        if kind == "Dense" and (normalize or not pooled):
            raise files.rejected(
                "its modules.json has a Dense layer before pooling or after normalisation, which"
                " is not supported"
            )
        pooled = pooled or kind == "Pooling"
    if not (pooled or own or settings.pooling):
        raise _unpooled(files, "the step Pooling in modules.json")
    return _overridden(PoolingRule(modes, normalize), settings)


def _unpooled(files: SentenceFiles, missing: str) -> ModelRejected:
    return files.rejected(
        f"it lacks {missing}, so how its vectors are pooled is unknown: copy the file from the"
        " model that it was made from, or set the option pooling"
    )


def _overridden(rule: PoolingRule, settings: Settings) -> PoolingRule:
    """The rule with the options `pooling` and `normalize` applied.

    Without pooling, vectors are not normalised by default, because hosts do so after pooling.
    """
    if settings.pooling:
        rule = replace(rule, modes=(cast(Mode, settings.pooling),))
    normalize = rule.normalize and not rule.per_token
    return replace(rule, normalize=normalize if settings.normalize is None else settings.normalize)


def _modes(files: SentenceFiles, folder: str) -> tuple[Mode, ...] | None:
    """Read a Pooling step's configuration; None if there is none. Its own default is the mean."""
    stated = files.value(f"{folder}/config.json")
    if not isinstance(stated, dict):
        return None
    named = stated.get("pooling_mode")
    if named is None:
        return tuple(mode for flag, mode in _FLAGS.items() if stated.get(flag)) or ("mean",)
    names = named if isinstance(named, list) else [named]
    unknown = [word for word in names if not isinstance(word, str) or word not in _NAMES]
    if unknown:
        raise files.rejected(f"its pooling {shown(unknown[0])} is not supported")
    return tuple(_NAMES[word] for word in names) or ("mean",)
