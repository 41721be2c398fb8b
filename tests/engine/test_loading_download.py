"""Downloads over real HTTP from a local hub: complete, refused, interrupted, cancelled."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from backend.engine.errors import Cancelled, ModelNotFound, ModelRejected
from backend.engine.loading import hub_child, hub_process
from backend.engine.loading.checkpoint import inspect
from backend.engine.loading.download import download
from backend.engine.loading.model_reference import HubModel
from backend.engine.settings import Settings
from tests.engine.embedding import rotary_checkpoints
from tests.engine.hub_server import COMMIT, Hub, running_hub
from tests.engine.loading_models import write_model
from tests.open_files import more_than_select_takes

REPOSITORY = "someone/small-model"
WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, and an environment as a host sets it for its backends."""
    with running_hub() as hub:
        hub.repositories[REPOSITORY] = write_model(tmp_path / "repository", shards=2)
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "models"))
        monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(tmp_path / "models"))
        yield hub


def get(
    repository: str = REPOSITORY, revision: str = "", cancel: threading.Event | None = None
) -> Path:
    model = HubModel(repository, revision, repository)
    return download(model, Settings(), cancel or threading.Event())


def partial_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "models").rglob("*.incomplete"))


@contextmanager
def nobody_there() -> Iterator[str]:
    """The address of a port that accepts connections and never answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_repository_is_downloaded_into_the_hosts_models_folder(hub: Hub, tmp_path: Path) -> None:
    path = get()
    assert path == tmp_path / "models" / "models--someone--small-model" / "snapshots" / COMMIT
    assert inspect(path, REPOSITORY, Settings()).weights_bytes > 0
    assert sorted(set(hub.sent)) == sorted(hub.sent)
    assert set(WEIGHTS) < set(hub.sent)


def test_the_adapters_of_tasks_are_downloaded_with_their_model(hub: Hub, tmp_path: Path) -> None:
    published = rotary_checkpoints.write("jina_v3", tmp_path / "published")
    hub.repositories[REPOSITORY] = rotary_checkpoints.in_form_of_transformers(
        published, tmp_path / "later"
    )
    found = {str(file.relative_to(get())) for file in get().glob("*/adapter_*")}
    assert {"text_matching/adapter_config.json", "text_matching/adapter_model.safetensors"} < found


def test_the_parts_of_embedders_and_tokenizers_are_downloaded(hub: Hub) -> None:
    names = "2_Dense/model.safetensors", "3_LayerNorm/model.safetensors", "tokenizer.model.v3"
    folder = hub.repositories[REPOSITORY]
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((folder / WEIGHTS[0]).read_bytes())
    path = get()
    assert all((path / name).is_file() for name in names)


def test_a_complete_copy_is_used_without_the_hub(hub: Hub) -> None:
    path = get()
    calls = hub.calls
    assert get() == path
    assert get(revision=COMMIT) == path
    assert hub.calls == calls


def test_unsupported_models_are_refused_before_their_weights_are_downloaded(hub: Hub) -> None:
    (hub.repositories[REPOSITORY] / "config.json").write_text('{"model_type": "deberta"}')
    with pytest.raises(ModelRejected, match="'deberta' is not supported"):
        get()
    assert not set(WEIGHTS) & set(hub.sent)


def test_a_repository_with_only_gguf_files_is_refused(hub: Hub) -> None:
    folder = hub.repositories[REPOSITORY]
    for path in folder.iterdir():
        path.unlink()
    (folder / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelRejected, match="is in GGUF format"):
        get()
    assert hub.sent == []


def test_missing_files_are_downloaded_again(hub: Hub) -> None:
    lost = get() / WEIGHTS[1]
    lost.resolve().unlink()
    lost.unlink()
    hub.sent.clear()
    assert (get() / WEIGHTS[1]).is_file()
    assert hub.sent == [WEIGHTS[1]]


def test_an_incomplete_copy_is_described_if_the_hub_is_unreachable(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = get()
    (path / "tokenizer.json").unlink()
    (path.parents[1] / "trees" / f"{COMMIT}.json").unlink()  # as older clients leave a cache
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str((tmp_path / "models").rename(tmp_path / "m")))
    with nobody_there() as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        with pytest.raises(ModelRejected, match="its tokenizer is missing"):
            get()


@pytest.mark.parametrize(
    ("repository", "revision", "sentence"),
    [
        ("someone/absent", "", "has no such repository, or it is private and HF_TOKEN"),
        ("someone/gated", "", "access to this repository must be requested on 127.0.0.1:"),
        (REPOSITORY, "v9", "the repository has no revision 'v9'"),
    ],
)
def test_an_unknown_repository_is_refused(
    hub: Hub, repository: str, revision: str, sentence: str
) -> None:
    hub.repositories["someone/gated"] = hub.repositories[REPOSITORY]
    hub.gated.add("someone/gated")
    with pytest.raises(ModelNotFound) as refusal:
        get(repository, revision)
    assert sentence in str(refusal.value)


def test_errors_of_the_hub_are_reported(hub: Hub) -> None:
    hub.failing = True
    with pytest.raises(ModelNotFound, match="answered with HTTP status 500; try again later"):
        get()


def test_a_hub_that_does_not_answer_is_reported(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with nobody_there() as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        with pytest.raises(ModelNotFound) as refusal:
            get()
    assert "is not in the cache, and 127.0.0.1:" in str(refusal.value)
    assert "cannot be reached" in str(refusal.value)
    # Hosts take this phrase for a lost backend, and would end the process.
    assert "connection refused" not in str(refusal.value).lower()


def test_downloads_turned_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="downloads are turned off"):
        get()
    assert hub.calls == 0


def test_a_read_only_cache_is_reported(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelRejected) as refusal:
        get()
    assert "the model cache cannot be written" in str(refusal.value)
    assert str(tmp_path) not in str(refusal.value)


def test_a_user_without_a_home_folder_is_told_what_to_set(
    hub: Hub, homeless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelRejected, match="set HF_HOME to a folder"):
        get()


def test_a_download_beside_more_open_files_than_select_takes(hub: Hub) -> None:
    with more_than_select_takes():
        assert (get() / "config.json").is_file()


def test_a_slow_download_is_cancelled_at_once_and_resumed_by_file(hub: Hub, tmp_path: Path) -> None:
    hub.blocked = {WEIGHTS[1]}
    cancel = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        download_ = threads.submit(get, cancel=cancel)
        assert hub.half_sent.wait(60)
        cancel.set()
        with pytest.raises(Cancelled, match="download of model 'someone/small-model' was"):
            download_.result(60)
    assert partial_files(tmp_path) == []
    hub.blocked.clear()
    hub.sent.clear()
    inspect(get(), REPOSITORY, Settings())
    assert WEIGHTS[1] in hub.sent
    assert "config.json" not in hub.sent


def test_the_child_ends_with_its_parent_and_leaves_no_partial_file(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.blocked = {"config.json"}
    started: list[hub_process.Child] = []
    follow = hub_process._follow

    def close_input(child: hub_process.Child, *rest: object) -> Path:
        started.append(child)
        assert hub.half_sent.wait(60)
        assert child.stdin is not None
        child.stdin.close()  # as when the parent ends
        return follow(child, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(hub_process, "_follow", close_input)
    with pytest.raises(ModelRejected, match="the download process ended"):
        get()
    assert started[0].poll() is not None
    assert partial_files(tmp_path) == []


def test_progress_is_logged(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    hub.blocked = {WEIGHTS[1]}

    class LetGo(logging.Handler):
        """Lets the hub continue once a progress line has counted all files but the held one."""

        def emit(self, record: logging.LogRecord) -> None:
            if "5 of 6 files" in record.getMessage():
                hub.go_on.set()

    handler = LetGo()
    logging.getLogger(hub_process.__name__).addHandler(handler)
    try:
        get()
    finally:
        logging.getLogger(hub_process.__name__).removeHandler(handler)
    assert "downloading model 'someone/small-model': 5 of 6 files, 0 of 0 MiB" in caplog.text
    assert "downloaded model 'someone/small-model'" in caplog.text


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), " does not fit on the disk of the"),
        (ValueError("connection refused"), ": its download failed (ValueError); try again"),
    ],
)
def test_other_failures_have_a_message(error: Exception, sentence: str) -> None:
    absent, text = hub_child._described(error, "")
    assert text.startswith(sentence)
    assert not absent


@pytest.mark.parametrize("name", ["weights.00.safetensors", "text.safetensors"])
def test_weights_under_other_names_are_downloaded(hub: Hub, tmp_path: Path, name: str) -> None:
    folder = hub.repositories[REPOSITORY] = write_model(tmp_path / "other")
    (folder / "model.safetensors").rename(folder / name)
    assert (get() / name).is_file()


def test_weights_that_only_the_index_names_are_downloaded(hub: Hub) -> None:
    folder = hub.repositories[REPOSITORY]
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(WEIGHTS[1], "vision.safetensors"))
    (folder / WEIGHTS[1]).rename(folder / "vision.safetensors")
    lost = get() / "vision.safetensors"
    lost.resolve().unlink()
    lost.unlink()
    assert (get() / "vision.safetensors").is_file()
