"""Opens a checkpoint with mlx-lm's reader of weights: as a network of ours, or as one of mlx-lm's.

A text model of mlx-lm embeds without its projection to logits, which many embedding checkpoints do
not have, and under the names of its inner model, as sentence-transformers writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.engine.device import WeightType
from backend.engine.embedding import rotary_bert
from backend.engine.embedding.dense_layers import DenseLayer, with_dense
from backend.engine.embedding.rotary_shape import shape_of
from backend.engine.embedding.task_adapters import TaskAdapter
from backend.engine.loading.weights import mlx_lm_classes
from common.model_kind import ModelKind

Weights = dict[str, mx.array]
_WHOLE = ("model.", "language_model.", "transformer.", "backbone.")


def open_rotary(
    name: str,
    config: Mapping[str, Any],
    kind: ModelKind,
    adapters: Sequence[TaskAdapter],
    type_: WeightType | None,
    dense: Sequence[DenseLayer],
    path: Path,
) -> tuple[Any, dict[str, Any]]:
    """Return the model, its weights still lazy, and its configuration with the fields others read.

    name: the model's. type_: what the weights will be cast to; None means their own type. Raises
    ModelRejected.
    """
    plan = rotary_bert.Plan(
        shape_of(name, config),
        ranks=kind is ModelKind.RERANK,
        adapters=tuple(adapters),
        dtype=getattr(mx, type_) if type_ else None,
    )
    arguments = type("Arguments", (), {"from_dict": staticmethod(lambda _: plan)})
    model, read = _opened(path, lambda **_: (with_dense(rotary_bert.Model, dense, path), arguments))
    return model, read | {
        "max_position_embeddings": plan.shape.longest,
        "hidden_size": plan.shape.hidden,
        "num_attention_heads": plan.shape.heads,
    }


def open_causal(
    dense: Sequence[DenseLayer],
    path: Path,
    stated: dict[str, Any] | None = None,
    prepare: Callable[[Weights], Weights] = dict,
) -> tuple[Any, dict[str, Any]]:
    """Return a text model of mlx-lm without its projection, its weights lazy, and config.json.

    stated: values that replace those of config.json. prepare: changes the weights as they are read.
    """

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        own, arguments = mlx_lm_classes(config)
        return with_dense(_without_head(own, prepare), dense, path), arguments

    return _opened(path, classes, stated)


def _opened(
    path: Path, classes: Callable[..., tuple[Any, Any]], stated: dict[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    from mlx_lm.utils import load_model

    model, config = load_model(path, lazy=True, model_config=stated, get_model_classes=classes)
    return model, config


def _without_head(own: Any, prepare: Callable[[Weights], Weights]) -> Any:
    def begin(model: Any, arguments: Any) -> None:
        own.__init__(model, arguments)
        model.pop("lm_head", None)

    def sanitize(model: Any, weights: Weights) -> Weights:
        weights = prepare(weights)
        if not any(name.startswith(_WHOLE) for name in weights):
            weights = {f"model.{name}": value for name, value in weights.items()}
        if hasattr(own, "sanitize"):
            weights = own.sanitize(model, weights)
        return {name: value for name, value in weights.items() if "lm_head." not in name}

    return type(own.__name__, (own,), {"__init__": begin, "sanitize": sanitize})
