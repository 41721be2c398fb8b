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

from backend.engine.device import WeightType
from backend.engine.embedding.network_loading import open_causal
from backend.engine.embedding.rotary_weights import Weights, add_changes
from backend.engine.embedding.task_adapters import TaskAdapter
from backend.engine.errors import ModelRejected
from backend.engine.loading.earlier_fields import earlier_fields
from backend.engine.loading.peft import changes_of

_LONGEST = 32768  # tokens that its code reads of a text
_TEXT = re.compile(r"^(?:base_model\.model\.)?(?:model\.)?(?:language_model\.)?(?:model\.)?(.+)$")
_PARTS = ("embed_tokens.", "layers.", "norm.")


def open_jina_v4(
    name: str, config: Mapping[str, Any], task: TaskAdapter, type_: WeightType | None, path: Path
) -> tuple[Any, dict[str, Any]]:
    """Return the model with a task's adapter, its weights still lazy, and its configuration.

    name: the model's. type_: what the weights will be cast to; None means their own type. Raises
    ModelRejected.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelRejected.because(name, "its config.json has no text_config")
    longest = min(_LONGEST, int(text["max_position_embeddings"]))
    stated = text | earlier_fields(text, ("rope_theta",)) | {"model_type": "qwen2"}
    stated |= {"rope_scaling": None, "rope_parameters": None}  # say how images are numbered

    def prepare(weights: Weights) -> Weights:
        own = _of_text(weights)
        add_changes(own, _changes(task), getattr(mx, type_) if type_ else None)
        return own

    model, read = open_causal((), path, stated, prepare)
    return model, read | {
        "model_type": config["model_type"],
        "max_position_embeddings": longest,
    }


def _of_text(weights: Mapping[str, mx.array]) -> Weights:
    """The weights of the language model, without those for images and for several vectors."""
    found: Weights = {}
    for name, value in weights.items():
        match = _TEXT.match(name)
        if match and match[1].startswith(_PARTS):
            found[match[1]] = value
    return found


def _changes(task: TaskAdapter) -> Weights:
    assert task.file is not None
    assert task.peft is not None
    read: Any = mx.load(str(task.file))
    changes = changes_of(read, task.peft, task.name)
    found = _of_text(changes)
    if not found:
        raise ValueError("its adapters have no weights for this task")
    return found
