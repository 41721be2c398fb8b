"""Which models requests may name, and under which names."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from common.field_names import named
from common.wording import shown
from gateway.errors import SERVER, ApiError, bad_field
from gateway.models.config import ModelConfig, Parameters
from gateway.models.reading import PLAIN_NAME, ModelFolder, place_of, read_folder, stamp_of
from gateway.supervisor import failures

HUB_ID = re.compile(rf"{PLAIN_NAME.pattern}/{PLAIN_NAME.pattern}", re.ASCII)
UNNAMED = "default_model"  # what clients of mlx_lm.server send for the model it started with
_log = logging.getLogger("gateway.supervisor")


class Catalogue:
    """The models of the folder, and those of the hub if the operator allows them.

    A request's name reaches the file system only as the name of a folder in the models folder.
    """

    def __init__(self, folder: ModelFolder, models_dir: Path | None, allow_unlisted: bool) -> None:
        self._folder = folder
        self._models_dir = models_dir
        self._allow_unlisted = allow_unlisted
        self._changed: dict[str, tuple[ModelConfig, ModelConfig]] = {}

    @property
    def models(self) -> list[ModelConfig]:
        return list(self._folder.models)

    @property
    def broken(self) -> dict[str, str]:
        """The error for each name in an invalid file."""
        return dict(self._folder.broken)

    def resolve(self, name: str | None) -> ModelConfig:
        """Return the model of this name, alias or adapter; for None or UNNAMED the only model.

        Raises ApiError: 404 for an unknown name, 500 for an invalid file, 400 without a name.
        """
        folder = self._folder  # which `reload` may replace meanwhile
        if name is None:
            if len(folder.models) != 1:
                raise failures.not_named(len(folder.models))
            return folder.models[0]
        if model := _named(name, folder.models):
            return model
        adapted = [model for model in folder.models if name in model.adapters]
        if len(adapted) > 1:
            raise failures.of_several(name, [model.name for model in adapted])
        if adapted:
            return adapted[0]
        if name in folder.broken:
            raise failures.broken_file(folder.broken[name])
        if name == UNNAMED:
            return self.resolve(None)
        if self._allow_unlisted and HUB_ID.fullmatch(name) and ".." not in name:
            return ModelConfig(name=name, parameters=Parameters(model=name))
        known = [other for each in folder.models for other in (*_names(each), *each.adapters)]
        raise failures.not_found(name, known)

    def model_named(self, name: str | None) -> ModelConfig:
        """Return a model as `resolve` does. Raises ApiError for the name of an adapter as well."""
        model = self.resolve(name)
        if name is not None and name in model.adapters:
            raise failures.an_adapter(name, model.name)
        return model

    def copy(self, source: str, name: str) -> None:
        """Write a file that gives a model a second name. Raises ApiError."""
        model = self.model_named(source)
        given = model.model_dump(mode="json", exclude_unset=True, exclude={"aliases", "preload"})
        if self._models_dir is None:
            raise failures.not_in_folder(source)
        if not PLAIN_NAME.fullmatch(name):
            raise bad_field(
                f"{named('destination')} is {shown(name)}: use letters, digits, '.', '_' and '-'"
            )
        if _named(name, self.models) or place_of(self._models_dir, name):
            raise bad_field(f"{named('destination')} is {shown(name)}, the name of another model")
        with _changing(), (self._models_dir / f"{name}.yaml").open("x", encoding="utf-8") as file:
            json.dump(given | {"name": name}, file, indent=1)
        self.adopt(self.read(always=True))

    def with_adapters(self, name: str, adapters: Mapping[str, str]) -> ModelConfig:
        """Return a model of the folder with other adapters. Raises ApiError for a name in use."""
        model = self.model_named(name)
        if model not in self._folder.models:
            raise failures.not_in_folder(name)
        for adapter in adapters.keys() - model.adapters.keys():
            if _named(adapter, self._folder.models):
                raise bad_field(f"{named('lora_name')} is {shown(adapter)}, the name of a model")
        given = model.model_dump(exclude_unset=True) | {"adapters": dict(adapters)}
        try:
            return ModelConfig.model_validate(given)
        except ValidationError as problems:
            reason = str(problems.errors()[0]["msg"]).removeprefix("Value error, ")
            raise bad_field(f"{named('lora_name')} or lora_path cannot be used: {reason}") from None

    def change(self, model: ModelConfig) -> None:
        """Serve a changed model of the folder, until its file changes."""
        before = self.model_named(model.name)
        in_file, _ = self._changed.get(model.name, (before, before))
        self._changed[model.name] = in_file, model
        self._folder = _with_models(self._folder, model)

    def remove(self, name: str) -> None:
        """Stop serving the model of this name: its file or folder is hidden. Raises ApiError."""
        place = self._models_dir and place_of(self._models_dir, name)
        if not place:
            raise failures.not_in_folder(name)
        with _changing():
            place.rename(place.with_name(f".{place.name}"))
        self.adopt(self.read(always=True))

    def read(self, *, always: bool = False) -> ModelFolder | None:
        """Return the models folder as it is now; None if it is unchanged, or cannot be read.

        This changes nothing, so it may run on a thread.
        """
        if self._models_dir is None:
            return None
        try:
            if stamp_of(self._models_dir) == self._folder.stamp and not always:
                return None
            return read_folder(self._models_dir)
        except OSError as problem:
            _log.error("the models folder could not be read again: %s", problem)
            return None

    def adopt(self, folder: ModelFolder | None) -> None:
        """Serve the models of a folder; the current models if it is None."""
        if folder is not None:
            # Changes of models apply until their files change.
            current = {model.name: model for model in folder.models}
            self._changed = {
                name: pair for name, pair in self._changed.items() if current.get(name) == pair[0]
            }
            changed = [model for _, model in self._changed.values()]
            self._folder = _with_models(folder, *changed)
            _log.info("read %d models, %d files are invalid", len(self.models), len(self.broken))


def _with_models(folder: ModelFolder, *changed: ModelConfig) -> ModelFolder:
    by_name = {model.name: model for model in changed}
    return replace(folder, models=[by_name.get(model.name, model) for model in folder.models])


@contextmanager
def _changing() -> Iterator[None]:
    """Raise ApiError if the models folder cannot be changed."""
    try:
        yield
    except OSError as problem:
        message = f"the models folder could not be changed: {problem.strerror}"
        raise ApiError(500, message, SERVER, "models_folder") from None


def _named(name: str, models: Sequence[ModelConfig]) -> ModelConfig | None:
    """Return the model of this name, alias or hub id, without regard to case if none matches."""
    for fold in (str, str.casefold):
        folded = fold(name)
        for of in (_names, lambda model: [model.parameters.model]):
            for model in models:
                if folded in map(fold, of(model)):
                    return model
    return None


def _names(model: ModelConfig) -> list[str]:
    return [model.name, *model.aliases]
