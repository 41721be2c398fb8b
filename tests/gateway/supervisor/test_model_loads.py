"""Models that are loaded and unloaded by request, and a models folder that changes meanwhile."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backend.engine.loading import hub_process
from backend.engine.loading.model_reference import HubModel
from common.progress_bar import DOWNLOAD
from gateway.models.config import ModelConfig, Parameters
from gateway.models.reading import read_folder
from gateway.settings import GatewaySettings
from gateway.supervisor.instance import Key, ModelInstance
from tests.gateway.asking import user_message
from tests.gateway.gateway_process import TINY_TEXT, WAIT, GatewayProcess, tiny
from tests.polling import until

KEY = "a-long-enough-key"


@pytest.fixture
def gateway() -> Iterator[GatewayProcess]:
    process = GatewayProcess({"tiny": tiny(aliases=["other"])})
    yield process
    process.close()


def cards(gateway: GatewayProcess) -> dict[str, Any]:
    return {card["id"]: card for card in gateway.client.get("/v1/models").json()["data"]}


def test_a_model_is_loaded_and_unloaded_by_request(gateway: GatewayProcess) -> None:
    def post(path: str, model: str) -> int:
        return gateway.client.post(f"/v1/models/{path}", json={"model": model}).status_code

    assert cards(gateway)["tiny"]["status"] == {"value": "unloaded", "failed": False, "error": ""}
    assert post("load", "absent") == 404
    assert post("load", "other") == 200
    until(lambda: cards(gateway)["tiny"]["status"]["value"] == "loaded")
    assert cards(gateway)["other"]["status"]["value"] == "loaded"
    assert post("unload", "tiny") == 200
    assert cards(gateway)["tiny"]["status"]["value"] == "unloaded"
    assert gateway.backends() == []


def test_a_model_that_does_not_exist_is_listed_as_failed(tmp_path: Path) -> None:
    later = tmp_path / "later"
    names = {"path": "/none/such", "name": "none", "home": "~/none/such", "later": str(later)}
    models: dict[str, Any] = {
        name: {"parameters": {"model": model}} for name, model in names.items()
    }
    models["hub"] = {"parameters": {"model": "owner/name"}}
    models["other"] = {"parameters": {"model": "m"}, "address": "127.0.0.1:1"}
    gateway = GatewayProcess(models)
    try:
        states = {name: card["status"] for name, card in cards(gateway).items()}
        assert {name for name, state in states.items() if state["failed"]} == set(names)
        assert "does not exist" in states["later"]["error"]
        later.symlink_to(TINY_TEXT)
        assert not cards(gateway)["later"]["status"]["failed"]
    finally:
        gateway.close()


def test_files_added_to_the_folder_are_served_and_removed_ones_are_not(
    gateway: GatewayProcess,
) -> None:
    shutil.copytree(TINY_TEXT, gateway.models_dir / "dropped")
    until(lambda: "dropped" in cards(gateway))
    asked = {"model": "dropped", "messages": user_message("Hi"), "max_tokens": 2}
    assert gateway.client.post("/v1/chat/completions", json=asked).status_code == 200
    file = gateway.models_dir / "named.yaml"
    file.write_text(json.dumps({"name": "named", "parameters": {"model": "dropped"}}))
    until(lambda: "named" in cards(gateway))
    assert "dropped" not in cards(gateway)  # listed only as `named`
    file.unlink()
    until(lambda: "named" not in cards(gateway))
    shutil.rmtree(gateway.models_dir / "dropped")
    until(lambda: set(cards(gateway)) == {"tiny", "other"})


def test_folders_without_a_file_are_models(tmp_path: Path) -> None:
    for name in ("one", "two", "draft", ".hidden", "not plain", "empty"):
        (tmp_path / name).mkdir()
        if name != "empty":
            (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "one-mtp").mkdir()  # a head that the backend finds beside its model
    (tmp_path / "one-mtp" / "config.json").write_text('{"model_type": "qwen3_5_mtp"}')
    files = {
        "a": {"parameters": {"model": "two"}, "disabled": True},
        "b": {"parameters": {"model": str(tmp_path / "x")}, "draft_model": "draft"},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(content))
    assert [model.name for model in read_folder(tmp_path).models] == ["b", "one"]


async def test_a_load_may_take_longer_while_its_download_progresses(tmp_path: Path) -> None:
    class Fetching:
        """A process that has downloaded more at each of six looks, and no more after them."""

        def __init__(self) -> None:
            self.looks = 0

        @property
        def download(self) -> tuple[int, int]:
            self.looks += 1
            return min(self.looks, 6), 80

    config = ModelConfig(name="m", parameters=Parameters(model="o/n"))
    instance = ModelInstance(Key("m"), config, GatewaySettings(load_timeout=0.01))
    process = Fetching()
    instance.backend = cast(Any, SimpleNamespace(process=process))
    with pytest.raises(TimeoutError):
        await instance._within_limit(asyncio.sleep(WAIT))
    assert process.looks == 7
    await instance._within_limit(asyncio.sleep(0))


def test_the_backends_download_progress_is_parsed(caplog: pytest.LogCaptureFixture) -> None:
    lines = '{"progress": "1 of 3 files, 20 of 80 MiB"}\n{"path": "/nowhere"}'
    child = subprocess.Popen(["echo", lines], stdout=subprocess.PIPE)
    with child, caplog.at_level("INFO"):
        model = HubModel("owner/name", "main", "owner/name, 9 of 8 MiB")
        hub_process._follow(child, model, threading.Event())
    found = DOWNLOAD.search(caplog.messages[-1])
    assert found is not None
    assert found.groups() == ("20", "80")


def test_the_log_has_the_names_of_keys_and_never_the_keys() -> None:
    other = "another-long-key"
    process = GatewayProcess({"tiny": tiny()}, MLX_GATEWAY_API_KEYS=f"alice {KEY}, {other}")
    try:
        for key, mark in ((KEY, "first"), (other, "second")):
            headers = {"authorization": f"Bearer {key}", "x-request-id": mark}
            assert process.client.get("/v1/models", headers=headers).status_code == 200
        headers = {"authorization": f"Bearer alice {KEY}"}
        assert process.client.get("/v1/models", headers=headers).status_code == 401
        assert "key=alice" in process.line_with("request=first")
        assert "key=" not in process.line_with("request=second")
        assert KEY not in "\n".join(process.log)
    finally:
        process.close()
