"""Opens a checkpoint as the network of `rotary_bert`, with mlx-lm's reader of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.engine.device import WeightType
from backend.engine.embedding import rotary_bert
from backend.engine.embedding.dense_layers import class_with
from backend.engine.embedding.pooling_rule import dense_layers
from backend.engine.embedding.rotary_shape import shape_of
from backend.engine.embedding.task_adapters import TaskAdapter
from common.model_kind import ModelKind


def open_rotary(
    name: str,
    config: Mapping[str, Any],
    kind: ModelKind,
    task: TaskAdapter | None,
    type_: WeightType | None,
    path: Path,
) -> tuple[Any, dict[str, Any]]:
    """The model, its weights still lazy, and its configuration with the fields that others read.

    name: the model's. type_: what the weights will be cast to; None means their own type. Raises
    ModelRejected.
    """
    from mlx_lm.utils import load_model

    plan = rotary_bert.Plan(
        shape_of(name, config),
        ranks=kind is ModelKind.RERANK,
        task=task,
        dtype=getattr(mx, type_) if type_ else None,
    )
    dense = () if plan.ranks else dense_layers(path, name, config) or ()
    own: Any = getattr(rotary_bert, class_with(dense, rotary_bert)) if dense else rotary_bert.Model

    def sanitize(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        for layer in dense:
            held: Any = mx.load(str(path / layer.folder / "model.safetensors"))
            weights |= {f"{layer.folder}.{part}": value for part, value in held.items()}
        named: dict[str, mx.array] = own.sanitize(model, weights)
        return named

    made = type(own.__name__, (own,), {"sanitize": sanitize})
    arguments = type("Arguments", (), {"from_dict": staticmethod(lambda _: plan)})
    model, read = load_model(path, lazy=True, get_model_classes=lambda **_: (made, arguments))
    return model, read | {
        "max_position_embeddings": plan.shape.longest,
        "hidden_size": plan.shape.hidden,
        "num_attention_heads": plan.shape.heads,
    }
