"""A draft model is found by the names that hosts use."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

from backend.engine.drafting.reference import naming_draft_model, resolve_draft
from backend.engine.errors import ModelNotFound, ModelRejected
from backend.engine.loading.model_reference import HubModel, LocalModel


@pytest.mark.parametrize(
    ("draft", "models", "repository", "revision"),
    [
        ("/models/org/name", "/models", "org/name", ""),
        ("/models/org/name@v2", "/models/", "org/name", "v2"),
        ("/models/https:/huggingface.co/org/name", "/models", "org/name", ""),
        ("/models/hf:/org/name", "/models", "org/name", ""),
        ("org/name", "/models", "org/name", ""),
        ("https://huggingface.co/org/name", "", "org/name", ""),
    ],
)
def test_a_repository_is_found_under_the_models_folder(
    draft: str, models: str, repository: str, revision: str
) -> None:
    place = resolve_draft(draft, models)
    assert isinstance(place, HubModel)
    assert (place.repository, place.revision) == (repository, revision)


def test_an_existing_folder_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    assert resolve_draft(str(folder), str(tmp_path)) == LocalModel(folder, "org/name")
    assert resolve_draft("org/name", str(tmp_path)) == LocalModel(folder, "org/name")
    assert resolve_draft(str(folder), "/elsewhere") == LocalModel(folder, "name")


@pytest.mark.parametrize(
    ("draft", "models"), [("/elsewhere/name", "/models"), ("/models", "/models"), ("/name", "")]
)
def test_a_missing_folder_elsewhere_is_named_in_the_error(draft: str, models: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve_draft(draft, models)
    assert "/" not in str(caught.value)


def test_an_error_of_a_load_does_not_keep_what_was_loaded() -> None:
    class Weights:
        pass

    def load() -> None:
        weights = Weights()
        loaded.append(weakref.ref(weights))
        raise ModelRejected("it is broken")

    loaded: list[weakref.ref[Weights]] = []
    with (
        pytest.raises(ModelRejected, match="DraftModel: it is broken") as caught,
        naming_draft_model(),
    ):
        load()
    assert caught.value.__context__ is not None
    assert loaded[0]() is None
