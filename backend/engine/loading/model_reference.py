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

# The message for a file in llama.cpp's format, which users name often.
GGUF = (
    "it is in GGUF format, which this backend does not read: use an MLX or safetensors model"
    " directory, or serve the file with the llama.cpp backend"
)
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][\w./-]{0,254}", re.ASCII)
_HUB_HOSTS = ("huggingface.co/", "hf.co/")
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
    normal = os.path.normpath
    is_folder_of_models = model_path and normal(model_file) == normal(model_path)
    if not reference and (not model_file or is_folder_of_models):
        raise InvalidRequest("no model is named: set Model to a folder or a hub repository")
    if path := _existing(reference, model_file, model_path):
        return LocalModel(_directory(path, name), name)
    if not reference or reference.lower().startswith(("file:", "/", "./", "~")):
        raise ModelNotFound(f"model {shown(name)} does not exist")
    return _on_hub(reference, name, revision, environ)


def _existing(reference: str, model_file: str, model_path: str) -> Path | None:
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


def _directory(path: Path, name: str) -> Path:
    """Return a path if it is a directory, or the directory of a file that belongs to a model."""
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        raise ModelRejected.because(name, GGUF)
    if path.name in _MODEL_FILES or path.suffix == ".safetensors":
        return path.parent
    raise ModelRejected(
        f"model {shown(name)} is a single file; name a directory with config.json, the tokenizer"
        " and model*.safetensors"
    )


def _on_hub(reference: str, name: str, revision: str, environ: Mapping[str, str]) -> HubModel:
    """Return the hub repository that a reference means, in any form in which people write it."""
    from huggingface_hub.utils import parse_hf_uri

    if reference.partition("@")[0].lower().endswith(".gguf"):
        raise ModelRejected.because(name, GGUF)
    endpoint = environ.get("HF_ENDPOINT") or None
    try:
        found = parse_hf_uri(_uri(reference, name, endpoint), endpoint)
    except ValueError:
        raise ModelNotFound(
            f"model {shown(name)} is neither a folder here nor a hub repository (owner/name)"
        ) from None
    file = found.path_in_repo
    if file.lower().endswith(".gguf"):
        raise ModelRejected.because(name, GGUF)
    of_model = file in ("", *_MODEL_FILES) or file.endswith(".safetensors")
    if found.type != "model" or "/" in file or not of_model:
        raise ModelRejected(
            f"model {shown(name)} names something inside a hub repository; a model must be at the"
            " top of its repository: write owner/name"
        )
    if found.revision and revision and found.revision != revision:
        raise InvalidRequest(
            f"model {shown(name)} names revision {shown(found.revision)}, but the option revision"
            f" is {shown(revision)}: give one of them"
        )
    chosen = found.revision or revision
    if chosen and not _REVISION.fullmatch(chosen):
        raise InvalidRequest(f"revision {shown(chosen)} is not the name of a branch, tag or commit")
    return HubModel(found.id, chosen, name)


def _uri(reference: str, name: str, endpoint: str | None) -> str:
    """Return a reference in a form that the hub's library reads: a URL, or hf://owner/name…

    The revision may also be at the end, after the name of a file.
    """
    scheme, colon, rest = reference.partition("://")
    scheme, path = (scheme.lower(), rest) if colon else ("hf", reference)
    address = path.lower().removeprefix("www.")
    if not colon and address.startswith(_HUB_HOSTS):
        scheme = "https"
    if scheme in ("huggingface", "hf"):
        path, _, revision = unquote(path).partition("@")
        owner, repository, *file = [*path.removeprefix("models/").split("/", 2), ""]
        return "/".join([f"hf://{owner}/{repository}@{revision}".removesuffix("@"), *file])
    own = urlsplit(endpoint).netloc if endpoint else "/"
    if scheme not in ("http", "https") or not address.startswith((*_HUB_HOSTS, f"{own}/")):
        raise ModelRejected(
            f"model {shown(name)} is not at a site that models are downloaded from: name a folder,"
            " a hub repository (owner/name) or its URL on huggingface.co"
        )
    return f"https://{path[-len(address) :]}"
