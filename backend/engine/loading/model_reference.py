"""Finds the model of a load request: a directory on this machine, or a repository on the hub.

LocalAI sets three fields of the request. ModelFile is always set, but often names a file that does
not exist; ModelPath is the host's folder of models; and Model is what the user wrote: a repository,
a folder under ModelPath, or a URL that an importer stored. A local directory takes precedence over
the hub. Errors contain the reference as the user wrote it, and never a local path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from backend.engine.errors import InvalidRequest, ModelNotFound, ModelRejected
from common.wording import shown

_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][\w./-]{0,254}", re.ASCII)
_HUB_SCHEMES = ("huggingface", "hf")
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_FILE_VERBS = ("tree", "blob", "resolve", "raw")
_MODEL_FILES = ("config.json", "model.safetensors.index.json")
_exists = os.path.exists  # False, without an error, for a name that is too long


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A directory on this machine. It exists but has not been checked."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository on the hub; an empty revision means its main branch."""

    repository: str
    revision: str
    name: str


def resolve(
    model: str,
    model_file: str = "",
    model_path: str = "",
    *,
    revision: str = "",
    environ: Mapping[str, str] = os.environ,
) -> LocalModel | HubModel:
    """Find out which model a load request means.

    Raises ModelNotFound, ModelRejected, InvalidRequest.
    """
    reference = model.strip()
    name = reference or Path(model_file).name
    if "\0" in model + model_file + model_path:
        raise ModelRejected(f"model {shown(name)} is not a name: it contains a zero byte")
    if ".." in re.split(r"[/\\]", unquote(reference)):
        raise ModelRejected(f"model {shown(name)} leaves its folder with '..': write it without")
    if not reference and (not model_file or _same(model_file, model_path)):
        raise InvalidRequest("no model is named: set Model to a folder or a hub repository")
    if path := _existing(reference, model_file, model_path):
        return LocalModel(_directory(path, name), name)
    if not reference or reference.lower().startswith(("file:", "/", "./", "~")):
        raise ModelNotFound(f"model {shown(name)} does not exist")
    return _on_hub(reference, name, revision, environ)


def _existing(reference: str, model_file: str, model_path: str) -> Path | None:
    """Return the first existing path among those that the request may mean."""
    candidates = [Path(model_file)] if model_file else []
    if reference.lower().startswith("file:"):
        candidates.append(Path(unquote(re.sub("^file:(//)?", "", reference, flags=re.IGNORECASE))))
    elif reference:
        path = Path(reference)
        if reference.startswith("~/"):
            with suppress(RuntimeError):  # the user has no home folder
                path = Path.home() / reference[2:]
        if path.is_absolute():
            candidates.append(path)
        else:
            if model_path:
                candidates.append(Path(model_path) / reference)
            if reference.startswith("./") or _exists(path / "config.json"):
                candidates.append(path)
    return next(filter(_exists, candidates), None)


def _same(first: str, second: str) -> bool:
    return bool(second) and os.path.normpath(first) == os.path.normpath(second)


def _directory(path: Path, name: str) -> Path:
    """Return a path if it is a directory, or the directory of a file that belongs to a model."""
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        raise gguf_rejected(name)
    if path.name in _MODEL_FILES or path.suffix == ".safetensors":
        return path.parent
    raise ModelRejected(
        f"model {shown(name)} is a single file; name a directory with config.json, the tokenizer"
        " and model*.safetensors"
    )


def gguf_rejected(name: str) -> ModelRejected:
    """Return the error for a file in llama.cpp's format, which users name often."""
    return ModelRejected(
        f"model {shown(name)} is in GGUF format, which this backend does not read: use an MLX or"
        " safetensors model directory, or serve the file with the llama.cpp backend"
    )


def _on_hub(reference: str, name: str, revision: str, environ: Mapping[str, str]) -> HubModel:
    """Return the hub repository that a reference means, in any form in which people write it."""
    parts, named_revision = _split(reference, name, environ)
    if parts and parts[-1].lower().endswith(".gguf"):
        raise gguf_rejected(name)
    if len(parts) > 2 and not (len(parts) == 3 and _is_model_file(parts[2])):
        raise ModelRejected(
            f"model {shown(name)} names something inside a hub repository; a model must be at the"
            " top of its repository: write owner/name"
        )
    repository = "/".join(parts[:2])
    if not _REPOSITORY.fullmatch(repository) or "--" in repository:
        raise ModelNotFound(
            f"model {shown(name)} is neither a folder here nor a hub repository (owner/name)"
        )
    if named_revision and revision and named_revision != revision:
        raise InvalidRequest(
            f"model {shown(name)} names revision {shown(named_revision)}, but the option revision"
            f" is {shown(revision)}: give one of them"
        )
    chosen = named_revision or revision
    if chosen and not _REVISION.fullmatch(chosen):
        raise InvalidRequest(f"revision {shown(chosen)} is not the name of a branch, tag or commit")
    return HubModel(repository, chosen, name)


def _split(reference: str, name: str, environ: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the parts of a hub reference's path (owner, name, file …) and its revision."""
    scheme, colon, rest = reference.partition("://")
    if not colon:
        host, _, path = reference.partition("/")
        if host.lower() in _HUB_HOSTS:
            return _of_url(path)
        return _of_path(reference)
    if scheme.lower() in _HUB_SCHEMES:
        return _of_path(rest.removeprefix("models/"))
    host, mirror = _host(reference) or "", _host(environ.get("HF_ENDPOINT", ""))
    if scheme.lower() in ("http", "https") and host and host in (*_HUB_HOSTS, mirror):
        return _of_url(rest.partition("/")[2])
    raise ModelRejected(
        f"model {shown(name)} is not at a site that models are downloaded from: name a folder, a"
        " hub repository (owner/name) or its URL on huggingface.co"
    )


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # for example half of an IPv6 address
        return None


def _of_path(path: str) -> tuple[list[str], str]:
    """Split `owner/name(/file)(@revision)`."""
    path, _, revision = path.partition("@")
    return [part for part in unquote(path).split("/") if part], unquote(revision)


def _of_url(path: str) -> tuple[list[str], str]:
    """Split `owner/name(/tree/revision(/file))`, as copied from a browser."""
    path = path.partition("?")[0].partition("#")[0]
    parts = [unquote(part) for part in path.split("/") if part]
    if len(parts) < 4 or parts[2] not in _FILE_VERBS:
        return parts, ""
    owner_and_name, rest = parts[:2], parts[3:]
    length = 3 if rest[0] == "refs" else 1  # refs/pr/1 is one revision
    return owner_and_name + rest[length:], "/".join(rest[:length])


def _is_model_file(name: str) -> bool:
    return name in _MODEL_FILES or name.endswith(".safetensors")
