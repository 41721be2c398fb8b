"""Prompts that are read after a load, by the real gateway with a real model."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.asking import WEATHER, user_message
from tests.gateway.gateway_process import GatewayProcess, tiny

SYSTEM = "You count things. " * 60
LOADED = {"preload": True, "context_size": 4096}


def first_turn(gateway: GatewayProcess, path: str = "/v1/chat/completions") -> dict[str, Any]:
    """The usage of an agent's first turn."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "messages": user_message("Hello!")}
    if path.endswith("messages"):
        function: Any = WEATHER["function"]
        tool = {"name": "get_weather", "description": function["description"]}
        body |= {"system": SYSTEM, "tools": [tool | {"input_schema": function["parameters"]}]}
    else:
        body["messages"] = [{"role": "system", "content": SYSTEM}, *body["messages"]]
        body["tools"] = [WEATHER]
    answer = gateway.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_the_first_turn_starts_from_the_prompt_of_the_models_file() -> None:
    given = {"system": SYSTEM, "tools": [WEATHER]}
    broken = {"system": "x", "tools": [{"type": "function", "function": {}}]}
    gateway = GatewayProcess({"tiny": tiny(**LOADED, warm_prompts=[broken, given])})
    try:
        gateway.line_with("warm_prompts[0] is left out: tools[0].function.name")
        gateway.line_with("tiny: read 1 prompts ahead")
        metrics = gateway.client.get("/metrics").text
        assert "gateway_prompt_tokens_total{" not in metrics
        assert 'path="/v1/chat/completions"' not in metrics
        assert 'gateway_model_leases{model="tiny"} 0.0' in metrics
        usage = first_turn(gateway)
        asked = gateway.client.post("/tokenize", json={"content": SYSTEM}).json()["count"]
        assert usage["prompt_tokens"] > cached(usage) >= asked
        assert usage["prompt_tokens"] - cached(usage) < 40
    finally:
        gateway.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_the_prompt_that_was_used_most_is_read_after_the_next_start(
    tmp_path: Path, path: str
) -> None:
    models = {"tiny": tiny(**LOADED)}
    gateway = GatewayProcess(models, MLX_BACKEND_CACHE=str(tmp_path))
    try:
        too_long = [{"role": "system", "content": SYSTEM * 60}, *user_message("Hello!")]
        for _ in range(2):
            first_turn(gateway, path)
            body = {"model": "tiny", "messages": too_long}
            assert gateway.client.post("/v1/chat/completions", json=body).status_code == 400
    finally:
        gateway.close()
    (file,) = (tmp_path / "gateway").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    (stored,) = json.loads(file.read_text())["tiny"]
    assert [message["content"] for message in stored["Messages"]] == [SYSTEM, "."]
    gateway = GatewayProcess(models, MLX_BACKEND_CACHE=str(tmp_path))
    try:
        gateway.line_with("tiny: read 1 prompts ahead")
        usage = first_turn(gateway)
        assert usage["prompt_tokens"] - cached(usage) < 40
        assert SYSTEM[:40] not in "\n".join(gateway.log)
    finally:
        gateway.close()


def test_nothing_is_stored_with_forget_prompts(tmp_path: Path) -> None:
    gateway = GatewayProcess(
        {"tiny": tiny(**LOADED)}, "--forget-prompts", MLX_BACKEND_CACHE=str(tmp_path)
    )
    try:
        for _ in range(2):
            first_turn(gateway)
    finally:
        gateway.close()
    assert not (tmp_path / "gateway").exists()
