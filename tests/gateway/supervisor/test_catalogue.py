"""Which model a name refers to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.errors import ApiError
from gateway.models.reading import read_folder
from gateway.supervisor.catalogue import UNNAMED, Catalogue


def catalogue(folder: Path, *names: str) -> Catalogue:
    for name in names:
        config = {"name": name, "parameters": {"model": "m"}, "aliases": [f"{name}-alias"]}
        (folder / f"{name.replace('/', '-')}.yaml").write_text(json.dumps(config))
    return Catalogue(read_folder(folder), folder, allow_unlisted=False)


@pytest.mark.parametrize("name", [None, UNNAMED, "one", "one-alias"])
def test_a_single_model_needs_no_name(tmp_path: Path, name: str | None) -> None:
    assert catalogue(tmp_path, "one").resolve(name).name == "one"


@pytest.mark.parametrize("name", [None, UNNAMED])
def test_with_several_models_a_name_is_required(tmp_path: Path, name: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        catalogue(tmp_path, "one", "two").resolve(name)
    assert (caught.value.status, caught.value.param) == (400, "model")


def test_a_model_may_have_the_default_name_itself(tmp_path: Path) -> None:
    assert catalogue(tmp_path, "one", UNNAMED).resolve(UNNAMED).name == UNNAMED


def test_an_adapter_of_two_models_needs_the_name_of_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        config = {"parameters": {"model": "m"}, "adapters": {"sql": "/a", name[0]: "/b"}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(config))
    models = Catalogue(read_folder(tmp_path), tmp_path, allow_unlisted=False)
    assert models.resolve("t").name == "two"
    with pytest.raises(ApiError, match="an adapter of 'one' and of 'two'") as caught:
        models.resolve("sql")
    assert caught.value.status == 400
    with pytest.raises(ApiError, match="an adapter of the model 'two'"):
        models.model_named("t")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"adapters": {"One": "/a"}}, "the model's own"),
        ({"adapters": {"also": "/a"}, "aliases": ["also"]}, "the model's own"),
        ({"adapters": {"a b": "/a"}}, "letters, digits"),
        ({"adapters": {"a": "/a,b"}}, "without commas"),
        ({"adapters": {"a": "/a"}, "backend": "/other/run.sh"}, "another backend"),
    ],
)
def test_adapters_that_no_request_could_choose_are_refused(
    tmp_path: Path, fields: dict[str, object], words: str
) -> None:
    config = {"name": "one", "parameters": {"model": "m"}} | fields
    (tmp_path / "one.yaml").write_text(json.dumps(config))
    assert words in read_folder(tmp_path).broken["one"]


def test_an_unchanged_folder_is_not_read_again(tmp_path: Path) -> None:
    models = catalogue(tmp_path, "one")
    assert models.read() is None
    (tmp_path / "two.yaml").write_text("parameters: {model: m}")
    models.adopt(models.read())
    assert models.resolve("two").name == "two"
    assert models.read() is None


def test_a_change_while_the_folder_is_read_is_kept(tmp_path: Path) -> None:
    """The folder is read on a thread, and requests may add adapters meanwhile."""
    models = catalogue(tmp_path, "one")
    (tmp_path / "two.yaml").write_text("parameters: {model: m}")
    read = models.read()
    models.change(models.with_adapters("one", {"sql": "/a"}))
    models.adopt(read)
    assert models.resolve("sql").name == "one"
    assert models.resolve("two").name == "two"
