"""Requests that choose an adapter of the model's file, over HTTP, to one real backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from gateway.models.config import ModelConfig
from gateway.routes.models import with_adapters
from tests.engine.test_loading_adapters import write_adapter
from tests.gateway.gateway_process import TINY_TEXT, GatewayProcess, tiny
from tests.polling import until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def write_random(folder: Path, seed: int) -> str:
    """An adapter for the projections of the small model, large enough to change its answers."""
    loaded = mx.load(str(TINY_TEXT / "model.safetensors"))
    assert isinstance(loaded, dict)
    weights: dict[str, mx.array] = {}
    for name, weight in loaded.items():
        if name.endswith("_proj.weight"):
            outputs, inputs = weight.shape
            key = mx.random.key(seed + len(weights))
            path = name.removesuffix(".weight")
            weights[f"{path}.lora_a"] = 0.1 * mx.random.normal((inputs, 2), key=key)
            weights[f"{path}.lora_b"] = 0.1 * mx.random.normal((2, outputs), key=key)
    return str(write_adapter(folder, weights, rank=2))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {name: write_random(folder / name, seed) for seed, name in enumerate(("a", "b"))}
    process = GatewayProcess({"tiny": tiny(adapters=adapters), "bare": tiny()})
    yield process
    process.close()


def answer(gateway: GatewayProcess, **fields: Any) -> str:
    body = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 24} | fields
    reply = gateway.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def test_answers_with_different_adapters_share_one_backend(gateway: GatewayProcess) -> None:
    alone = {name: answer(gateway, adapters=name) for name in ("a", "b")} | {"": answer(gateway)}
    assert len(set(alone.values())) == 3
    assert alone[""] == answer(gateway, model="bare")
    wanted = ["a", "", "b", "a", "b", "", "b", "a"]
    with ThreadPoolExecutor(len(wanted)) as threads:
        together = list(threads.map(lambda name: answer(gateway, adapters=name or None), wanted))
    assert together == [alone[name] for name in wanted]
    assert sum("event=load " in line for line in gateway.log) == 2, gateway.log


def test_an_adapter_is_chosen_as_in_other_servers(gateway: GatewayProcess) -> None:
    chosen = answer(gateway, adapters="b")
    assert answer(gateway, model="b") == chosen
    assert answer(gateway, lora=[{"id": 0, "scale": 0}, {"id": 1, "scale": 1}]) == chosen
    assert answer(gateway, lora=[]) == answer(gateway)
    names = [card["id"] for card in gateway.client.get("/v1/models").json()["data"]]
    assert sorted(names) == ["a", "b", "bare", "tiny"]
    reply = gateway.client.post(
        "/v1/messages",
        json={"model": "b", "max_tokens": 24, "temperature": 0, "messages": QUESTION},
    )
    assert reply.json()["content"][0]["text"] == chosen


def test_programs_offer_an_adapter_beside_its_model(gateway: GatewayProcess) -> None:
    cards = {card["id"]: card for card in gateway.client.get("/v1/models").json()["data"]}
    assert cards["a"]["meta"]["alias_of"] is None
    assert cards["a"]["meta"]["aliases"] == []
    tags = gateway.client.get("/api/tags").json()["models"]
    assert sorted(tag["model"] for tag in tags) == ["a", "b", "bare", "tiny"]


def test_an_adapter_whose_name_is_not_its_own_is_not_offered() -> None:
    models = [
        ModelConfig.model_validate({"name": name, "parameters": {"model": "m"}, "adapters": own})
        for name, own in (("one", {"sql": "/a", "fr": "/b"}), ("two", {"sql": "/c", "one": "/d"}))
    ]
    assert with_adapters(models) == {"one": ["fr"], "two": []}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/embeddings", {"model": "b", "input": "x"}),
        ("DELETE", "/api/delete", {"model": "b"}),
        ("POST", "/api/copy", {"source": "b", "destination": "c"}),
    ],
)
def test_what_an_adapter_cannot_do_is_not_done_to_its_model(
    gateway: GatewayProcess, method: str, path: str, body: dict[str, Any]
) -> None:
    reply = gateway.client.request(method, path, json=body)
    assert reply.status_code == 400, reply.text
    assert "an adapter of the model 'tiny'" in reply.text
    assert gateway.client.get("/v1/models/tiny").status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"adapters": "c"}, "adapters", "c"),
        ({"lora": [{"id": 2, "scale": 1}]}, "lora", "2 adapters"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora", "other than 0 and 1"),
        ({"lora": [{"id": 0, "scale": 1}, {"id": 1, "scale": 1}]}, "lora", "use one"),
        ({"options": {"lora": [{"id": 2, "scale": 1}]}}, "lora", "2 adapters"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_refused(
    gateway: GatewayProcess, fields: dict[str, Any], param: str, words: str
) -> None:
    body = {"model": "tiny", "messages": QUESTION} | fields
    reply = gateway.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert words in reply.json()["error"]["message"]


@pytest.mark.parametrize(("path", "field"), [("messages", "messages"), ("responses", "input")])
@pytest.mark.parametrize("chosen", [{"adapters": "a"}, {"lora": [{"id": 0, "scale": 1}]}])
def test_apis_without_a_field_for_adapters_name_the_one_to_send(
    gateway: GatewayProcess, path: str, field: str, chosen: dict[str, Any]
) -> None:
    body = {"model": "tiny", field: QUESTION, "max_tokens": 4} | chosen
    if path == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    reply = gateway.client.post(f"/v1/{path}", json=body)
    assert reply.status_code == 400, reply.text
    assert "send the adapter's name as model" in reply.json()["error"]["message"]


@pytest.fixture
def changing(tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway of one model without adapters, with folders of adapters beside it."""
    process = GatewayProcess({"tiny": tiny()})
    for seed, name in enumerate(("a", "b")):
        write_random(process.models_dir / name, seed)
    yield process
    process.close()


def post(gateway: GatewayProcess, path: str, **body: Any) -> httpx.Response:
    return gateway.client.post(path, json=body)


def test_adapters_are_loaded_and_unloaded_while_streams_run(changing: GatewayProcess) -> None:
    bare = answer(changing)
    assert post(changing, "/v1/load_lora_adapter", lora_name="x", lora_path="a").text == (
        "Success: LoRA adapter 'x' added successfully."
    )
    alone = {"x": answer(changing, model="x"), "": bare}
    assert alone["x"] != bare
    long = {name: answer(changing, model=name or "tiny", max_tokens=300) for name in alone}
    with ThreadPoolExecutor(4) as threads:
        running = {
            name: threads.submit(answer, changing, model=name or "tiny", max_tokens=300)
            for name in alone
        }
        for _ in range(3):
            reply = post(changing, "/v1/load_lora_adapter", lora_name="y", lora_path="b")
            assert reply.status_code == 200, reply.text
            alone.setdefault("y", answer(changing, model="y"))
            assert answer(changing, model="y") == alone["y"]
            assert answer(changing, model="x") == alone["x"]
            reply = post(changing, "/v1/unload_lora_adapter", lora_name="y")
            assert reply.status_code == 200, reply.text
            assert post(changing, "/v1/completions", model="y", prompt="a").status_code == 404
        assert {name: begun.result() for name, begun in running.items()} == long
    assert len(set(alone.values())) == 3
    assert sum("event=load " in line for line in changing.log) > 4
    assert sum("weights" in line and "loaded in" in line for line in changing.log) == 1


def test_a_backend_that_starts_again_has_the_same_adapters(changing: GatewayProcess) -> None:
    file = changing.models_dir / "tiny.yaml"
    written = file.read_bytes()
    assert post(changing, "/load_lora_adapter", lora_name="x", lora_path="a").status_code == 200
    before = answer(changing, model="x")
    assert post(changing, "/v1/models/unload", model="tiny").json() == {"success": True}
    assert answer(changing, model="x") == before
    (changing.models_dir / "other.yaml").write_text('{"parameters": {"model": "nowhere"}}')
    wait_for_model(changing, "other")
    cards = {card["id"]: card for card in changing.client.get("/v1/models").json()["data"]}
    assert cards["x"]["parent"] == "tiny"
    assert answer(changing, model="x") == before
    assert file.read_bytes() == written
    changed = json.loads(written) | {"description": "whoever changes the file decides"}
    file.write_text(json.dumps(changed))
    wait_for_model(changing, "x", listed=False)


def wait_for_model(gateway: GatewayProcess, name: str, *, listed: bool = True) -> None:
    def seen() -> bool:
        cards = gateway.client.get("/v1/models").json()["data"]
        return (name in {card["id"] for card in cards}) == listed

    until(seen)


def test_scales_choose_the_adapter_of_requests_that_name_none(gateway: GatewayProcess) -> None:
    alone = {name: answer(gateway, adapters=name) for name in ("a", "b")} | {"": answer(gateway)}
    for scales, name in (([1.0, 0.0], "a"), ([0.0, 1.0], "b"), ([0.0, 0.0], "")):
        body = [{"id": at, "scale": scale} for at, scale in enumerate(scales)]
        reply = gateway.client.post("/lora-adapters?model=tiny", json=body)
        assert reply.json() == {"success": True}
        listed = gateway.client.get("/lora-adapters?model=tiny").json()
        assert [each["scale"] for each in listed] == scales
        assert answer(gateway) == alone[name]
        assert answer(gateway, adapters="a") == alone["a"]
        assert answer(gateway, lora=[]) == alone[""]
    for wrong, words in (
        ([{"id": 0, "scale": 0.5}], "other than 0 and 1"),
        ([{"id": 0, "scale": 1}, {"id": 1, "scale": 1}], "uses 2 adapters"),
        ([{"id": 2, "scale": 1}], "2 adapters"),
        ({"id": 0}, "list"),
    ):
        reply = gateway.client.post("/lora-adapters?model=tiny", json=wrong)
        assert reply.status_code == 400, reply.text
        assert words in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("load", {"lora_name": "x", "lora_path": "../a"}, 400, "inside the models folder"),
        ("load", {"lora_name": "x", "lora_path": "/etc"}, 400, "inside the models folder"),
        ("load", {"lora_name": "x", "lora_path": "out"}, 400, "inside the models folder"),
        ("load", {"lora_name": "x", "lora_path": ""}, 400, "inside the models folder"),
        ("load", {"lora_name": "x", "lora_path": "a\0"}, 404, "no such adapter"),
        ("load", {"lora_name": "x", "lora_path": "none"}, 404, "no such adapter"),
        ("load", {"lora_name": "x", "lora_path": "empty"}, 400, "adapter_config.json"),
        ("load", {"lora_name": "tiny", "lora_path": "a"}, 400, "the name of a model"),
        ("load", {"lora_name": "x y", "lora_path": "a"}, 400, "letters, digits"),
        ("load", {"lora_name": "a", "lora_path": "a"}, 400, "already loaded"),
        ("load", {"lora_name": "x", "lora_path": "a", "load_inplace": True}, 400, "inplace"),
        ("load", {"lora_name": "x"}, 400, "lora_path is missing"),
        ("unload", {"lora_name": "x"}, 404, "not loaded"),
        ("unload", {}, 400, "lora_name is missing"),
    ],
)
def test_adapters_that_cannot_change_are_refused(
    refusing: GatewayProcess, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    reply = refusing.client.post(f"/v1/{path}_lora_adapter", json=body)
    assert reply.status_code == status, reply.text
    assert words in reply.json()["error"]["message"]
    assert str(refusing.models_dir) not in reply.text
    assert [each["path"] for each in refusing.client.get("/lora-adapters").json()] == ["a"]


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    outside = write_random(tmp_path_factory.mktemp("outside") / "a", 1)
    process = GatewayProcess({"tiny": tiny(adapters={"a": outside})})
    write_random(process.models_dir / "a", 1)
    (process.models_dir / "empty").mkdir()
    (process.models_dir / "out").symlink_to(outside)
    yield process
    process.close()


def test_adapters_stay_as_they_are_if_there_are_several_keys() -> None:
    keys = "a-first-key-of-two,a-second-key"
    process = GatewayProcess({"tiny": tiny()}, MLX_GATEWAY_API_KEYS=keys)
    process.client.headers["authorization"] = "Bearer a-second-key"
    for path, body in (
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "a"}),
        ("unload_lora_adapter", {"lora_name": "x"}),
        ("lora-adapters", []),
    ):
        reply = process.client.post(f"/v1/{path}", json=body)
        assert reply.status_code == 403, reply.text
    process.close()
