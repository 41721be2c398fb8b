"""The adapters that an embedding checkpoint has for its tasks, and the one that a load asks for.

Jina embeddings v3 keeps them in its weights, one behind another, and names them in config.json.
Its conversion for transformers 5 has a folder for each, as PEFT writes it. Jina embeddings v4 has
one such folder for all of them, and is always used with one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend.engine.errors import InvalidRequest, ModelRejected
from backend.engine.loading.json_files import BadFileError, read_object
from backend.engine.loading.peft import WEIGHTS, Peft, read_peft
from common.wording import shown

_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class TaskAdapter:
    """scale: multiplies its product, and what PEFT states. place: among those in the weights.

    file, peft: PEFT's weights, and what it states about them; None for those in the weights.
    """

    name: str
    scale: float = 1.0
    place: int = 0
    file: Path | None = None
    peft: Peft | None = None


def task_adapter(
    path: Path, name: str, config: Mapping[str, Any], wanted: str
) -> TaskAdapter | None:
    """The adapter for a task; None without one. name: the model's. wanted: the option `task`.

    Spellings with dots, hyphens and underscores are the same. Raises InvalidRequest, ModelRejected.
    """
    needed = is_jina_v4(config)
    if not (wanted or needed):
        return None
    tasks = _tasks(path, name, config)
    if not wanted:
        raise InvalidRequest(
            f"task is empty, but the model needs one of {', '.join(map(shown, tasks))}: set it"
        )
    for task, adapter in tasks.items():
        if _plain(task) == _plain(wanted):
            return adapter
    if not tasks:
        raise InvalidRequest(
            f"task is {shown(wanted)}, but the model has no tasks: leave it empty for this model"
        )
    none = "" if needed else ", or leave it empty to use none of the model's adapters"
    raise InvalidRequest(
        f"task is {shown(wanted)}, but the model's tasks are {', '.join(map(shown, tasks))}: name"
        f" one of these{none}"
    )


def is_jina_v4(config: Mapping[str, Any]) -> bool:
    """Whether it is jina-embeddings-v4, which has the model type of Qwen2.5-VL."""
    names = config.get("architectures") or ()
    return config.get("model_type") == "qwen2_5_vl" and "JinaEmbeddingsV4Model" in names


def _plain(task: str) -> str:
    return task.replace(".", "_").replace("-", "_")


def _tasks(path: Path, name: str, config: Mapping[str, Any]) -> dict[str, TaskAdapter]:
    named = config.get("task_names")
    if is_jina_v4(config) and isinstance(named, list):
        shared = _of_peft(path / "adapters", name)
        return {str(task): replace(shared, name=str(task)) for task in named}
    if found := sorted(file.parent for file in path.glob(f"*/{_CONFIG}")):
        return {folder.name: _of_peft(folder, name) for folder in found}
    stacked = config.get("lora_adaptations")
    if not isinstance(stacked, list) or not stacked:
        return {}
    scale = _scale(name, config.get("lora_alpha"), config.get("lora_rank"))
    return {str(task): TaskAdapter(str(task), scale, place) for place, task in enumerate(stacked)}


def _of_peft(folder: Path, name: str) -> TaskAdapter:
    try:
        peft = read_peft(read_object(folder / _CONFIG))
        if peft.dora:
            raise ValueError("its use_dora is True, but only False is supported")
    except (BadFileError, ValueError) as error:
        raise ModelRejected.because(
            name, f"its adapter {shown(folder.name)} cannot be added: {error}"
        ) from None
    return TaskAdapter(folder.name, file=folder / WEIGHTS, peft=peft)


def _scale(name: str, alpha: Any, rank: Any) -> float:
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or rank < 1:
        raise ModelRejected.because(
            name, f"its adapters for tasks have the alpha {shown(alpha)} and the rank {shown(rank)}"
        )
    return alpha / rank
