"""The text part of jina-embeddings-v4: Qwen2.5-VL's language model with an adapter for each task.

mlx-lm's Qwen2 computes it, because the three positions of a text's token are the same number. Its
code keeps the adapters of all tasks in one file of PEFT, which has a matrix for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from backend.engine.device import WeightType
from backend.engine.embedding.kind import JINA_V4
from backend.engine.embedding.rotary_weights import Weights, add_changes
from backend.engine.embedding.task_adapters import TaskAdapter
from backend.engine.errors import ModelRejected
from backend.engine.loading.earlier_fields import earlier_fields

_LONGEST = 32768  # tokens that its code reads of a text
_TEXT = re.compile(r"^(?:base_model\.model\.)?(?:model\.)?(?:language_model\.)?(?:model\.)?(.+)$")
_PARTS = ("embed_tokens.", "layers.", "norm.")


class _Model(Module):
    """Qwen2 without its projection to logits."""

    model_type = JINA_V4

    def __init__(self, arguments: Any) -> None:
        from mlx_lm.models.qwen2 import Qwen2Model

        super().__init__()  # type: ignore[no-untyped-call]
        self.model = Qwen2Model(arguments)


def open_jina_v4(
    name: str, config: Mapping[str, Any], task: TaskAdapter, type_: WeightType | None, path: Path
) -> tuple[Any, dict[str, Any]]:
    """The model with a task's adapter, its weights still lazy, and its configuration.

    name: the model's. type_: what the weights will be cast to; None means their own type. Raises
    ModelRejected.
    """
    from mlx_lm.models.qwen2 import ModelArgs
    from mlx_lm.utils import load_model

    text = _text_config(name, config)
    dtype = getattr(mx, type_) if type_ else None

    def sanitize(_: Any, weights: Weights) -> Weights:
        own = {f"model.{part}": value for part, value in _of_text(weights).items()}
        add_changes(own, _changes(task), dtype)
        return own

    made = type("Model", (_Model,), {"sanitize": sanitize})
    arguments = type(
        "Arguments", (), {"from_dict": staticmethod(lambda _: ModelArgs.from_dict(text))}
    )
    model, read = load_model(path, lazy=True, get_model_classes=lambda **_: (made, arguments))
    return model, read | {
        "max_position_embeddings": min(_LONGEST, int(text["max_position_embeddings"]))
    }


def _text_config(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelRejected.because(name, "its config.json has no text_config")
    found = text | earlier_fields(text, ("rope_theta",)) | {"model_type": "qwen2"}
    found.pop("rope_scaling", None)  # says how images are numbered
    return found


def _of_text(weights: Mapping[str, mx.array]) -> Weights:
    """The weights of the language model, without those for images and for several vectors."""
    found: Weights = {}
    for name, value in weights.items():
        match = _TEXT.match(name)
        if match and match[1].startswith(_PARTS):
            found[match[1]] = value
    return found


def _changes(task: TaskAdapter) -> Weights:
    read: Any = mx.load(str(task.file))
    first, second = f".lora_A.{task.name}.weight", f".lora_B.{task.name}.weight"
    held = _of_text(read)
    found = {}
    for name in [name for name in held if name.endswith(first)]:
        module = name.removesuffix(first)
        left, right = held[f"{module}{second}"], held[name]
        product = left.astype(mx.float32) @ right.astype(mx.float32)
        found[f"model.{module}.weight"] = product * task.scale
    if not found:
        raise ValueError("its adapters have no weights for this task")
    return found
