"""Manages the models on this machine: those in the hub's cache, and the default model."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli import default_model
from common import launch
from common.hub_cache import NoHome, hub_cache
from common.progress_bar import DOWNLOAD
from common.user_path import user_path
from common.wording import did_you_mean

if TYPE_CHECKING:
    from gateway.models.config import ModelConfig


class NoSuchModel(click.ClickException):
    """This machine has no model of this name; `str()` says what to do."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A downloaded model."""

    folder: Path
    repository: str = ""  # its hub id; empty for the default model

    @property
    def reference(self) -> str:
        """What to pass to the gateway for this model: the hub id, or the folder."""
        return self.repository or str(self.folder)

    @property
    def name(self) -> str:
        return self.repository or self.folder.name

    @property
    def short(self) -> str:
        """The name without the owner of the repository."""
        return self.name.rpartition("/")[2]

    @property
    def nbytes(self) -> int:
        """The size of the model's files in bytes."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    @property
    def changed(self) -> float:
        """When the model was downloaded, in seconds since the epoch."""
        return self.folder.stat().st_mtime


def found() -> list[LocalModel]:
    """Return all complete models, sorted by name."""
    return sorted(_found(), key=lambda model: model.name.casefold())


def _found() -> Iterator[LocalModel]:
    with suppress(default_model.ModelUnavailable):
        if default_model.is_ready(default_model.location()):
            yield LocalModel(default_model.location())
    with suppress(NoHome, OSError):
        for folder in hub_cache().glob("models--*--*"):
            repository = folder.name.removeprefix("models--").replace("--", "/", 1)
            with suppress(OSError, ValueError):
                revision = (folder / "refs" / "main").read_text(encoding="ascii").strip()
                snapshot = folder / "snapshots" / revision
                if is_model(snapshot):
                    yield LocalModel(snapshot, repository)


def is_model(folder: Path) -> bool:
    """Return whether a folder has the files of a model."""
    return (folder / "config.json").is_file() and any(
        file.is_file() for file in folder.glob("*.safetensors")
    )


def named(name: str) -> LocalModel:
    """Return a model. Raises NoSuchModel.

    name: a folder, a hub id or a short name; upper and lower case of names do not matter.
    """
    local = user_path(name)
    if is_model(local):
        return LocalModel(local.absolute())
    models = found()
    for model in models:
        if name.casefold() in (model.name.casefold(), model.short.casefold()):
            return model
    known = [spelling for model in models for spelling in (model.name, model.short)]
    suggestion = did_you_mean(name, known) or "; see `mlx-backend list`"
    raise NoSuchModel(f"the model {name!r} is not on this machine{suggestion}")


def config_of(model: LocalModel) -> ModelConfig:
    """Return the configuration with which the gateway would serve the model."""
    from gateway.models.checkpoint import Checkpoints
    from gateway.models.reading import single

    (config,) = single(model.reference).models
    return Checkpoints(Path.cwd()).completed(config)


def description(model: LocalModel) -> dict[str, str]:
    """Return the properties of a model that can be read from its files, for `mlx-backend show`.

    Raises NoSuchModel.
    """
    from gateway.models.checkpoint import Checkpoints

    config, checkpoints = config_of(model), Checkpoints(Path.cwd())
    content: Any = None
    with suppress(ValueError, RecursionError):
        content = json.loads((model.folder / "config.json").read_bytes())
    if not isinstance(content, dict):
        raise NoSuchModel(
            f"the file config.json of {model.name} is not a JSON object: download the model again"
        )
    context = checkpoints.context_size(config)
    found = content.get("quantization") or content.get("quantization_config")
    quantised = found if isinstance(found, dict) else {}
    sampling = config.parameters.model_dump(exclude={"model"}, exclude_defaults=True)
    return {
        "name": model.name,
        "folder": str(model.folder),
        "size": size(model.nbytes),
        "architecture": str(content.get("model_type", "unknown")),
        "quantisation": f"{quantised['bits']} bits" if quantised.get("bits") else "none",
        "context": f"{context:,} tokens" if context else "unlimited",
        "abilities": ", ".join(checkpoints.abilities(config)) or "unknown",
        "sampling": ", ".join(f"{key} {value:g}" for key, value in sampling.items()) or "default",
    }


def pull(reference: str) -> str:
    """Download a model, and check that it can be served.

    Returns a message for the user. Raises ClickException, ModelUnavailable, OSError.
    """
    from cli.progress import Progress

    if reference.casefold() == default_model.NAME.casefold():
        return f"{default_model.NAME} is in {default_model.ensure()}"
    downloading = subprocess.Popen(
        launch.command("-m", "backend.engine.loading.download", reference),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert downloading.stdout is not None
    last: deque[str] = deque(maxlen=1)
    with Progress(f"downloading {reference}") as progress:
        for line in downloading.stdout:
            if match := DOWNLOAD.search(line):
                progress.show(int(match[1]), int(match[2]))
            elif line.strip():
                last.append(line.strip())
    if downloading.wait() != 0:
        raise click.ClickException(last[0] if last else "the download ended")
    return f"{reference} is in {last[0]}"


def remove(model: LocalModel) -> int:
    """Delete a model's files. Returns the bytes that were freed. Raises OSError."""
    if model.repository:
        from huggingface_hub import scan_cache_dir

        cache = scan_cache_dir(hub_cache())
        revisions = [
            revision.commit_hash
            for repository in cache.repos
            if repository.repo_id == model.repository and repository.repo_type == "model"
            for revision in repository.revisions
        ]
        plan = cache.delete_revisions(*revisions)
        plan.execute()
        return int(plan.expected_freed_size)
    nbytes = model.nbytes
    shutil.rmtree(model.folder)
    return nbytes


def size(nbytes: int) -> str:
    """Return a number of bytes as text with a unit."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
