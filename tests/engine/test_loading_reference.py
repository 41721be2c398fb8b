"""Model references: local models win over the hub, every form is read, and none escapes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.errors import EngineError, InvalidRequest, ModelNotFound, ModelRejected
from backend.engine.loading.model_reference import HubModel, LocalModel, resolve


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A models folder with one model in it, under a hub-like name."""
    directory = tmp_path / "models" / "owner" / "name"
    directory.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "weights.gguf", "notes.txt"):
        (directory / name).touch()
    return tmp_path / "models"


def test_existing_model_file_comes_first(models: Path, tmp_path: Path) -> None:
    other = tmp_path / "snapshot"
    other.mkdir()
    assert resolve("owner/name", str(other), str(models)) == LocalModel(other, "owner/name")


def test_folder_under_the_models_root_comes_second(models: Path) -> None:
    expected = LocalModel(models / "owner/name", "owner/name")
    assert resolve("owner/name", str(models / "gone"), str(models)) == expected
    assert resolve(" owner/name ", "", str(models)) == expected


def test_a_reference_to_a_home_folder_that_there_is_not(homeless: None) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        resolve("~/model")


def test_hub_comes_last(models: Path) -> None:
    missing = str(models / "org/other")
    assert resolve("org/other", missing, str(models)) == HubModel("org/other", "", "org/other")


def test_plain_directories(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = models / "owner" / "name"
    assert resolve(str(directory)) == LocalModel(directory, str(directory))
    assert resolve(f"file://{directory}") == LocalModel(directory, f"file://{directory}")
    assert resolve("", str(directory), str(models)) == LocalModel(directory, "name")
    monkeypatch.chdir(models)
    assert resolve("./owner") == LocalModel(Path("owner"), "./owner")
    assert resolve("owner/name") == LocalModel(Path("owner/name"), "owner/name")
    assert resolve("owner/name").name == "owner/name"


def test_a_working_directory_without_a_model_does_not_hide_the_hub(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models / "org" / "other").mkdir(parents=True)
    monkeypatch.chdir(models)
    assert resolve("org/other") == HubModel("org/other", "", "org/other")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_of_a_model_means_its_directory(models: Path, name: str) -> None:
    found = resolve(f"owner/name/{name}", "", str(models))
    assert isinstance(found, LocalModel)
    assert found.path == models / "owner" / "name"


@pytest.mark.parametrize(
    ("reference", "repository", "revision"),
    [
        ("mlx-community/Qwen3-4B-4bit", "mlx-community/Qwen3-4B-4bit", ""),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("https://huggingface.co/org/name", "org/name", ""),
        ("https://huggingface.co/org/name/", "org/name", ""),
        ("http://www.huggingface.co/org/name?library=mlx#top", "org/name", ""),
        ("huggingface.co/org/name", "org/name", ""),
        ("HTTPS://HF.CO/org/name", "org/name", ""),
        ("https://huggingface.co/org/name/tree/main", "org/name", "main"),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F1", "org/name", "refs/pr/1"),
        ("https://huggingface.co/org/name/tree/refs/pr/1", "org/name", "refs/pr/1"),
        ("https://huggingface.co/org/name/blob/main/config.json", "org/name", "main"),
        ("https://huggingface.co/org/name/resolve/v2/model.safetensors", "org/name", "v2"),
        ("https://mirror.example/org/name", "org/name", ""),
        ("huggingface://org/name", "org/name", ""),
        ("huggingface://org/name@abc123", "org/name", "abc123"),
        ("huggingface://org/name/model.safetensors@main", "org/name", "main"),
        ("hf://org/name", "org/name", ""),
        ("hf://models/org/name@refs/pr/2", "org/name", "refs/pr/2"),
    ],
)
def test_hub_forms(reference: str, repository: str, revision: str) -> None:
    environ = {"HF_ENDPOINT": "https://mirror.example"}
    assert resolve(reference, environ=environ) == HubModel(repository, revision, reference)


def test_revision_setting() -> None:
    assert resolve("org/name", revision="v1") == HubModel("org/name", "v1", "org/name")
    assert resolve("org/name@v1", revision="v1") == HubModel("org/name", "v1", "org/name@v1")
    with pytest.raises(InvalidRequest, match="names revision 'v1', but the option revision is"):
        resolve("org/name@v1", revision="v2")
    with pytest.raises(InvalidRequest, match="is not the name of a branch"):
        resolve("org/name", revision="a b")
    with pytest.raises(InvalidRequest, match="is not the name of a branch"):
        resolve("org/name", revision="a/../b")


@pytest.mark.parametrize(
    ("reference", "kind", "sentence"),
    [
        ("", InvalidRequest, "no model is named: set Model to a folder or a hub repository"),
        ("nothing-here", ModelNotFound, "neither a folder here nor a hub repository (owner/name)"),
        ("/no/such/folder", ModelNotFound, "model '/no/such/folder' does not exist"),
        ("./no/such/folder", ModelNotFound, "model './no/such/folder' does not exist"),
        ("file:///no/such/folder", ModelNotFound, "model 'file:///no/such/folder' does not exist"),
        ("../owner/name", ModelRejected, "leaves its folder with '..'"),
        ("owner/../../etc", ModelRejected, "leaves its folder with '..'"),
        ("hf://owner/%2e%2e/name", ModelRejected, "leaves its folder with '..'"),
        ("owner\\..\\name", ModelRejected, "leaves its folder with '..'"),
        ("a\0b", ModelRejected, "contains a zero byte"),
        ("x" * 100_000, ModelNotFound, "neither a folder here"),
        ("owner/name/weights.gguf", ModelRejected, "is in GGUF format"),
        ("huggingface://o/n/x.Q4_K_M.gguf", ModelRejected, "the llama.cpp backend"),
        ("absent.gguf", ModelRejected, "is in GGUF format"),
        ("owner/name/notes.txt", ModelRejected, "is a single file; name a directory"),
        ("https://huggingface.co/o/n/tree/main/sub", ModelRejected, "inside a hub repository"),
        ("https://huggingface.co/datasets/o/n", ModelRejected, "inside a hub repository"),
        ("https://example.com/o/n", ModelRejected, "not at a site that models are downloaded from"),
        ("https://[half", ModelRejected, "not at a site that models are downloaded from"),
        ("oci://registry/o/n", ModelRejected, "not at a site that models are downloaded from"),
        ("https://huggingface.co/o", ModelNotFound, "neither a folder here"),
        ("o/na--me", ModelNotFound, "neither a folder here"),
    ],
)
def test_an_invalid_reference_gets_its_own_message(
    models: Path, reference: str, kind: type[EngineError], sentence: str
) -> None:
    with pytest.raises(kind) as refusal:
        resolve(reference, f"{models}/{reference}", str(models))
    assert sentence in str(refusal.value)
    assert str(models) not in str(refusal.value)
    assert len(str(refusal.value)) < 300


@given(st.text(max_size=60))
def test_any_reference_resolves_or_is_refused(reference: str) -> None:
    message = ""
    try:
        found = resolve(reference, "", "/nonexistent")
        assert isinstance(found, HubModel) or found.path.exists()
    except EngineError as refusal:
        message = str(refusal)
    assert "/nonexistent" not in message
