"""A checkpoint's sampling defaults apply if nothing else sets them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.models.checkpoint import Checkpoints
from gateway.models.config import ModelConfig
from gateway.openai.sampling import SamplingFields, write_sampling
from tests.gateway.asking import ADDITION, user_message
from tests.gateway.gateway_process import TINY_TEXT, GatewayProcess, tiny
from wire import backend_pb2 as pb

SAID = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "presence_penalty": 1.5,
    "do_sample": True,
    "eos_token_id": [2],
}


def _config(model: str = "m", **parameters: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "parameters": {"model": model, **parameters}})


def _write(folder: Path, content: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content))


def _options(config: ModelConfig, **fields: Any) -> pb.PredictOptions:
    options = pb.PredictOptions()
    write_sampling(options, SamplingFields(**fields), config)
    return options


def _sampling_of(options: pb.PredictOptions) -> tuple[float, ...]:
    names = ("Temperature", "TopP", "TopK", "MinP", "Penalty", "Repeat", "PresencePenalty")
    return tuple(round(getattr(options, name), 4) for name in names)


def test_a_user_without_a_home_folder_has_no_downloads(
    tmp_path: Path, homeless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.weight_bytes(_config("someone/model")) == 0
    assert checkpoints.completed(_config("someone/model")).name == "m"


def test_defaults_come_from_each_source_in_turn(tmp_path: Path) -> None:
    """The order: the request, the model's file, the checkpoint, OpenAI's defaults."""
    checkpoints = Checkpoints(tmp_path)
    silent = checkpoints.completed(_config())
    assert _sampling_of(_options(silent)) == (1.0, 1.0, 0, 0.0, 1.0, 64, 0.0)
    _write(tmp_path / "m", SAID)
    config = checkpoints.completed(_config())
    assert _sampling_of(_options(config)) == (0.6, 0.95, 20, 0.05, 1.05, -1, 1.5)
    config = checkpoints.completed(_config(temperature=0.2, top_k=0, repeat_last_n=9))
    assert _sampling_of(_options(config)) == (0.2, 0.95, 0, 0.05, 1.05, 9, 1.5)
    config = checkpoints.completed(_config(temperature=0.2))
    asked = _options(config, temperature=0.0, repeat_penalty=1.0, presence_penalty=0.0)
    assert _sampling_of(asked) == (0.0, 0.95, 20, 0.05, 1.0, -1, 0.0)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for content, temperature in (({"temperature": 0.25}, 0.25), ({"do_sample": False}, 0.0)):
        _write(tmp_path / "m", content)
        assert checkpoints.completed(_config()).parameters.temperature == temperature
    assert checkpoints.completed(_config(str(tmp_path / "m"))).parameters.temperature == 0.0


@pytest.mark.parametrize("revision", ["main", "v2"])
def test_a_checkpoint_on_the_hub_is_used_once_it_is_downloaded(
    tmp_path: Path, revision: str
) -> None:
    checkpoints = Checkpoints(tmp_path / "models")
    config = ModelConfig.model_validate(
        {
            "name": "m",
            "parameters": {"model": "someone/small"},
            "env": {"HF_HUB_CACHE": str(tmp_path)},
            "options": ["revision:v2"] if revision == "v2" else [],
        }
    )
    assert checkpoints.completed(config) == config
    repository = tmp_path / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / revision).write_text("abc123\n")
    _write(repository / "snapshots" / "abc123", SAID)
    assert checkpoints.completed(config).parameters.top_k == 20


@pytest.mark.parametrize(
    "content", [[], {"temperature": "hot", "top_p": 3, "top_k": 20.5, "min_p": None}, "[" * 99_999]
)
def test_invalid_values_are_ignored(tmp_path: Path, content: Any) -> None:
    _write(tmp_path / "m", content)
    if isinstance(content, str):
        (tmp_path / "m" / "generation_config.json").write_text(content)
    assert Checkpoints(tmp_path).completed(_config()) == _config()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("checkpoint") / "hot"
    shutil.copytree(TINY_TEXT, folder)
    _write(folder, {"eos_token_id": 2, "temperature": 0.125, "top_k": 3})
    hot = tiny(parameters={"model": str(folder)})
    process = GatewayProcess({"tiny": tiny(), "hot": hot, "own": {**hot, "aliases": ["mine"]}})
    yield process
    process.close()


def test_the_list_of_models_has_the_effective_values(gateway: GatewayProcess) -> None:
    cards = {card["id"]: card["meta"] for card in gateway.client.get("/v1/models").json()["data"]}
    assert cards["tiny"]["defaults"]["temperature"] == 0.0
    assert cards["hot"]["defaults"] == cards["mine"]["defaults"]
    assert cards["hot"]["defaults"] == {
        "temperature": 0.125,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    one = gateway.client.get("/v1/models/mine").json()
    assert one["meta"]["defaults"] == cards["hot"]["defaults"]


def test_a_request_without_values_uses_the_checkpoints(gateway: GatewayProcess) -> None:
    """The small model's own temperature is 0, so each seed gives the same answer."""
    texts = set()
    for seed in range(4):
        body = {"model": "tiny", "messages": user_message(ADDITION), "seed": seed}
        answer = gateway.client.post("/v1/chat/completions", json=body)
        texts.add(answer.json()["choices"][0]["message"]["content"])
    assert len(texts) == 1
    body = {"model": "hot", "input": "Hi", "max_output_tokens": 1}
    response = gateway.client.post("/v1/responses", json=body).json()
    assert (response["temperature"], response["top_p"]) == (0.125, 1.0)


def test_memory_is_what_the_file_says_or_the_size_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "one.safetensors").write_bytes(b"x" * 700)
    (tmp_path / "m" / "two.safetensors").write_bytes(b"x" * 300)
    (tmp_path / "m" / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.weight_bytes(_config()) == 1000
    config = _config().model_copy(update={"memory_mib": 2})
    assert checkpoints.weight_bytes(config) == 2 << 20


def test_a_model_on_the_hub_counts_as_far_as_it_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    checkpoints, config = Checkpoints(tmp_path), _config("owner/name")
    assert checkpoints.weight_bytes(config) == 0
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / "abc"
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "blobs" / "two.incomplete").write_bytes(b"x" * 50)
    (repository / "blobs" / "one").write_bytes(b"x" * 100)
    (snapshot / "one.safetensors").symlink_to(repository / "blobs" / "one")
    assert checkpoints.weight_bytes(config) == 150
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 700}}))
    assert checkpoints.weight_bytes(config) == 700
    index.write_text("[]")
    assert checkpoints.weight_bytes(config) == 150
