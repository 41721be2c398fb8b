"""Reads a checkpoint's sampling defaults, size and abilities before the model is loaded.

Values in `generation_config.json` apply if neither the request nor the model's file sets them. They
are read once the checkpoint has been downloaded.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.abilities import abilities, text_only
from common.context_size import context_in
from common.hub_cache import NoHome, hub_cache
from gateway.models.config import DEFAULTS, OWN_BACKENDS, ModelConfig, Parameters

_LARGEST = 1 << 20
_LARGEST_INDEX = 64 << 20
_THEIRS = {"repeat_penalty": "repetition_penalty"}  # field: its name in generation_config.json
_log = logging.getLogger("gateway.models")
_Stamp = tuple[int, int]


class Checkpoints:
    """A reader of checkpoints; it reads a file again only after the file has changed."""

    def __init__(self, models_dir: Path) -> None:
        self._models_dir = models_dir
        self._read: dict[Path, tuple[_Stamp, dict[str, Any]]] = {}

    def completed(self, config: ModelConfig) -> ModelConfig:
        """Return the model, with the checkpoint's values where its file sets none."""
        found = self._defaults_of(self._folder(config) / "generation_config.json")
        given = config.parameters
        new = {name: value for name, value in found.items() if getattr(given, name) is None}
        if "repeat_penalty" in new and given.repeat_last_n is None:
            new["repeat_last_n"] = -1  # transformers applies its penalty to the whole text
        if not new:
            return config
        return config.model_copy(update={"parameters": given.model_copy(update=new)})

    def weight_bytes(self, config: ModelConfig) -> int:
        """Return the approximate memory that a model will need; 0 if unknown before a download.

        During a download the index of the weights arrives first, so the size is known early.
        """
        if config.memory_mib:
            return config.memory_mib << 20
        folder = self._folder(config)
        # Folders of the hub's cache contain links, some to files that do not exist yet or any more.
        present = _sizes(folder, "*.safetensors")
        if folder.parent.name == "snapshots":
            present += _sizes(folder.parents[1] / "blobs", "*.incomplete")
        return max(present, _indexed(folder / "model.safetensors.index.json"))

    def abilities(self, config: ModelConfig) -> tuple[str, ...]:
        """Return the abilities of a model, under Ollama's names."""
        flags = "embedding" if config.embeddings else "rerank" if config.reranking else ""
        return abilities(self._folder(config), config.option("type") or flags)

    def context_size(self, config: ModelConfig) -> int | None:
        """Return the maximum tokens of prompt and answer, by the file and the checkpoint."""
        given = 0 if config.option("context") == "max" else config.context_size
        limits = (given, config.max_model_len, context_in(self._folder(config)))
        return min(filter(None, limits), default=None)

    def is_text_only(self, config: ModelConfig) -> bool:
        """Return whether a model is known to accept only text; False for one at an address."""
        return not config.address and text_only(self._folder(config), config.option("type") or "")

    def is_missing(self, config: ModelConfig) -> bool:
        """Return whether a model, by its name, is neither on this machine nor on the hub."""
        name = config.parameters.model
        if config.address or config.backend not in OWN_BACKENDS or name[:5].lower() == "file:":
            return False
        local = name.startswith(("/", "~/")) or "/" not in name
        with suppress(OSError, RuntimeError):  # a folder that may not be read; no home folder
            return local and not (self._models_dir / Path(name).expanduser()).exists()
        return False

    def _folder(self, config: ModelConfig) -> Path:
        """Return the folder of a checkpoint, which may not be downloaded yet.

        For a checkpoint that is a file, this is the folder that contains the file.
        """
        name = config.parameters.model
        local = self._models_dir / name
        if local.is_file():
            return local.parent
        if local.exists() or name.count("/") != 1:
            return local
        try:
            repository = hub_cache(os.environ | config.env) / f"models--{name.replace('/', '--')}"
        except NoHome:
            return local
        revision = config.option("revision") or "main"
        with suppress(OSError, ValueError):
            revision = (repository / "refs" / revision).read_text(encoding="ascii").strip()
        return repository / "snapshots" / revision

    def _defaults_of(self, file: Path) -> dict[str, Any]:
        try:
            status = file.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if (known := self._read.get(file)) and known[0] == stamp:
                return known[1]
            with file.open("rb") as opened:
                found = _sampling(json.loads(opened.read(_LARGEST)))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError):
            _log.warning("generation_config.json of %s cannot be read", file.parent.name)
            found = {}
        self._read[file] = stamp, found
        return found


def _sizes(folder: Path, pattern: str) -> int:
    with suppress(OSError):
        return sum(map(_size, folder.glob(pattern)))
    return 0


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0


def _indexed(index: Path) -> int:
    """Return the bytes of all weights according to the index; 0 if there is no index."""
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        if _size(index) <= _LARGEST_INDEX:
            return int(json.loads(index.read_bytes())["metadata"]["total_size"])
    return 0


def _sampling(content: Any) -> dict[str, Any]:
    """Return the sampling values, under their names in model files, that are in range."""
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    found: dict[str, Any] = {}
    for name in DEFAULTS:
        file_name = _THEIRS.get(name, name)
        if (value := content.get(file_name)) is None:
            continue
        try:
            Parameters.model_validate({"model": "-", name: value})
        except ValidationError:
            _log.warning("generation_config.json has the %s %.40r: left out", file_name, value)
        else:
            found[name] = value
    if content.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
