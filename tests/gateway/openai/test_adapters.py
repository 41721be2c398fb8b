"""Requests that choose an adapter of the model's file, over HTTP, to one real backend."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from gateway.models.config import ModelConfig
from gateway.routes.models import with_adapters
from tests.engine.test_loading_adapters import write_adapter
from tests.gateway.gateway_process import TINY_TEXT, GatewayProcess, tiny

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
