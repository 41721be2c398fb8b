"""The models folder: one YAML file per model, and checkpoints without a file.

An invalid file does not affect the others.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from common.drafter_kind import is_drafter
from common.expansion import expanded_count
from common.user_path import user_path
from common.wording import did_you_mean, shown
from gateway.models.config import ModelConfig, Parameters

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_MOST_BYTES, _MOST_VALUES = 1 << 17, 100_000
_Problem = yaml.constructor.ConstructorError
_log = logging.getLogger("gateway.models")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The models by file name, and the error for each name in an invalid file."""

    models: list[ModelConfig] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    stamp: frozenset[tuple[str, int, int]] = frozenset()  # see `stamp_of`


def read_folder(folder: Path) -> ModelFolder:
    """Return every model of a folder.

    Names and aliases are assigned in the order of the files' names. Raises NotADirectoryError if
    there is no such folder.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"the models folder {folder} does not exist")
    found = ModelFolder(stamp=stamp_of(folder))
    owners: dict[str, str] = {}
    described: set[str] = set()
    for file in _files(folder):
        given: Any = None
        try:
            given = _load(file)
            described |= _references(given)
            if not isinstance(given, dict):
                raise ValueError("a model file is a map of keys, such as `name: my-model`")
            model = _validated({"name": file.stem, **given})
            if model.disabled:
                continue
            _claim(model, file.name, owners)
            found.models.append(model)
        except ValueError as problem:
            message = f"{file.name}: {problem}"
            _log.error("%s", message)
            # Names by which requests may refer to a model whose file is invalid.
            name = given.get("name") if isinstance(given, dict) else None
            found.broken[name if isinstance(name, str) else file.stem] = message
    for name in owners:
        found.broken.pop(name, None)
    for place in _checkpoints(folder):
        name = place.name
        named = name in described or str(place) in described or name in owners
        if not (named or is_drafter(place)):
            found.models.append(ModelConfig(name=name, parameters=Parameters(model=name)))
    return found


def single(reference: str, settings: Sequence[str] = ()) -> ModelFolder:
    """Return the only model of a gateway: a folder or a hub id, loaded at start.

    Raises ValueError for a folder of several models, and for a setting that cannot be used.

    settings: keys of its file, as `KEY=VALUE` with dots between sections; the values are YAML.
    """
    local = user_path(reference)
    if not local.exists():
        model = reference
    elif (
        local.is_dir()
        and not (local / "config.json").exists()
        and (any(_files(local)) or any(_checkpoints(local)))
    ):
        raise ValueError(
            f"{reference} is a folder of models: serve it with --models-dir {reference}"
        )
    else:
        model = str(local.absolute())
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-.") or "model"
    spellings = dict.fromkeys((reference, reference.rstrip("/"), Path(model).name))
    aliases = [spelling for spelling in spellings if spelling not in ("", name, model)]
    given = {"name": name, "aliases": aliases, "parameters": {"model": model}, "preload": True}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--model-setting is {setting!r}: write KEY=VALUE")
        try:
            _set(given, key.strip().split("."), yaml.safe_load(value))
        except yaml.YAMLError:
            raise ValueError(f"--model-setting {key}: {value!r} is not YAML") from None
    try:
        return ModelFolder([_validated(given)])
    except ValueError as problem:
        raise ValueError(f"--model-setting: {problem}") from None


def _set(section: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *outer, name = path
    for key in outer:
        inner = section.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ValueError(f"--model-setting {'.'.join(path)}: {key} is not a section")
        section = inner
    section[name] = value


def place_of(folder: Path, name: str) -> Path | None:
    """Return the file of a model in a models folder, or its checkpoint there.

    None if it has neither.
    """
    for file in _files(folder):
        with contextlib.suppress(ValueError):
            given = _load(file)
            if isinstance(given, dict) and given.get("name", file.stem) == name:
                return file
    return next((place for place in _checkpoints(folder) if place.name == name), None)


def stamp_of(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Return a value that changes when a model is added, removed or edited. Raises OSError."""
    stamp = set()
    for file in (*_files(folder), *(place / "config.json" for place in _checkpoints(folder))):
        with contextlib.suppress(FileNotFoundError):
            status = file.stat()
            stamp.add((str(file), status.st_mtime_ns, status.st_size))
    return frozenset(stamp)


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Yield the folders that contain a model and whose names a request can use."""
    for place in sorted(folder.iterdir()):
        if PLAIN_NAME.fullmatch(place.name) and (place / "config.json").is_file():
            yield place


def _references(given: Any) -> set[str]:
    """Return the checkpoints that a model file refers to, even if that file is invalid."""
    if not isinstance(given, dict):
        return set()
    parameters = given.get("parameters")
    model = parameters.get("model") if isinstance(parameters, dict) else None
    drafts = given.get("draft_models")
    names = [model, given.get("draft_model"), *(drafts if isinstance(drafts, list) else ())]
    return {name.rstrip("/") for name in names if isinstance(name, str)}


def _files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        if file.suffix in (".yaml", ".yml") and not file.name.startswith(".") and file.is_file():
            yield file


def _claim(model: ModelConfig, file: str, owners: dict[str, str]) -> None:
    names = [model.name, *model.aliases]
    for place, name in enumerate(names):
        kind = "alias" if place else "name"
        if name in owners:
            raise ValueError(f"the {kind} {name!r} is in use by {owners[name]}: choose another")
        if name in names[:place]:
            raise ValueError(f"aliases has {name!r}, which is the model's own name")
    owners.update(dict.fromkeys(names, file))


def _validated(given: Mapping[str, Any]) -> ModelConfig:
    """Return the model. Raises ValueError with all problems."""
    try:
        return ModelConfig.model_validate(given)
    except ValidationError as problems:
        listed = problems.errors(include_url=False)
        # A key that belongs to the section explains why the section is missing.
        if "parameters" not in given and given.keys() & Parameters.model_fields.keys():
            listed = [problem for problem in listed if problem["type"] != "missing"]
        raise ValueError("; ".join(_message(ModelConfig, each) for each in listed)) from None


def _message(model: type[BaseModel], problem: Mapping[str, Any]) -> str:
    """Return one of pydantic's errors as a message for the author of the file."""
    path = [part for part in problem["loc"] if isinstance(part, str | int)]
    key = ".".join(str(part) for part in path)
    if problem["type"] == "extra_forbidden":
        if len(path) == 1 and key in Parameters.model_fields:
            return f"{key} belongs to the section parameters: write `parameters: {{{key}: …}}`"
        if path[0] == "parameters" and path[-1] in ModelConfig.model_fields:
            return f"{path[-1]} does not belong to the section parameters: write it outside"
        return (
            f"{key} is not a key of a model file{did_you_mean(str(path[-1]), _keys(model, path))}"
        )
    if problem["type"] == "missing":
        return f"{key} is missing"
    reason = str(problem["msg"]).removeprefix("Value error, ")
    if not key or problem["type"] == "value_error":
        return reason
    return f"{key} is {shown(problem['input'])}: {reason.replace('Input', 'it', 1)}"


def _keys(model: type[BaseModel], path: list[str | int]) -> list[str]:
    for part in path[:-1]:
        inner = model.model_fields[str(part)].annotation
        assert isinstance(inner, type)
        model = inner
    return list(model.model_fields)


class _Loader(yaml.SafeLoader):
    """A loader that refuses duplicate keys; YAML's own loader silently uses the last one."""


def _unique(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
    seen = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _Problem(None, None, "a key is not text", key.start_mark)
        if key.value in seen:
            raise _Problem(None, None, f"the key {key.value!r} is given twice", key.start_mark)
        seen.add(key.value)
    return loader.construct_mapping(node, deep)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique)


def _load(file: Path) -> Any:
    """Return the content of a file. Raises ValueError."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"has more than {_MOST_BYTES} bytes")
        loader = _Loader(file.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if expanded_count(node, "value") > _MOST_VALUES:
            raise ValueError(f"its aliases expand to more than {_MOST_VALUES} values")
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except OSError as problem:
        raise ValueError(f"cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = getattr(problem, "problem", None) or " ".join(str(problem).split())
        raise ValueError(f"{place}{reason}") from None
