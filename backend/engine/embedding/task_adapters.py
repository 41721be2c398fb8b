"""Finds the adapter of an embedding checkpoint for the task that a load asks for.

Jina embeddings v3 has the adapters of its tasks stacked in its weights, and names the tasks in
config.json. Its conversion for transformers 5 has a folder in PEFT's format for each task. Jina
embeddings v4 has one such folder for all tasks, and is always used with a task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.engine.load_request import AdapterRequest
from backend.engine.loading.adapters import CONFIG, Adapter, inspect_adapter
from backend.engine.loading.peft import read_peft
from common.wording import shown


def task_adapter(path: Path, config: Mapping[str, Any], wanted: str) -> Adapter | None:
    """Return the adapter for a task; None if no task is set.

    Dots, hyphens and underscores in a task's name are equivalent.

    wanted: the option `task`; '' if it is not set.

    Raises InvalidRequest, Unusable.
    """
    needed = is_jina_v4(config)
    if not (wanted or needed):
        return None
    tasks = _tasks(path, config)
    if not wanted:
        raise InvalidRequest(
            f"task is empty, but the model needs one of {', '.join(map(shown, tasks))}: set it"
        )
    for task, find in tasks.items():
        if _plain(task) == _plain(wanted):
            return replace(find(), task=True)
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
    """Return whether a model is jina-embeddings-v4, which has the model type of Qwen2.5-VL."""
    names = config.get("architectures") or ()
    return config.get("model_type") == "qwen2_5_vl" and "JinaEmbeddingsV4Model" in names


def _plain(task: str) -> str:
    return task.replace(".", "_").replace("-", "_")


def _tasks(path: Path, config: Mapping[str, Any]) -> dict[str, Callable[[], Adapter]]:
    """Return, for each task, a function that returns its adapter."""
    named, stacked = config.get("task_names"), config.get("lora_adaptations")
    if is_jina_v4(config) and isinstance(named, list):
        shared = path / "adapters"
        return {
            str(task): partial(inspect_adapter, shared, AdapterRequest(str(task)), str(task))
            for task in named
        }
    if found := sorted(file.parent for file in path.glob(f"*/{CONFIG}")):
        return {
            folder.name: partial(inspect_adapter, folder, AdapterRequest(folder.name))
            for folder in found
        }
    if not isinstance(stacked, list):
        return {}
    return {
        str(task): partial(_stacked, path, config, str(task), index)
        for index, task in enumerate(stacked)
    }


def _stacked(path: Path, config: Mapping[str, Any], task: str, index: int) -> Adapter:
    stated = {"lora_alpha": config.get("lora_alpha")}
    peft = replace(read_peft(stated, "config.json"), place=index)
    return Adapter(task, "lora", path / "model.safetensors", 1.0, "", peft)
