"""The content of `/api/status`, and that reading it loads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from backend.engine.settings import Settings
from gateway.models.config import ModelConfig
from gateway.routes.models import DEFAULT_SLOTS, slots
from tests.gateway.gateway_process import GatewayProcess, tiny


def config(**settings: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "parameters": {"model": "x"}, **settings})


def test_the_default_is_the_backend_s() -> None:
    assert Settings().parallel == DEFAULT_SLOTS


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, DEFAULT_SLOTS),
        ({"options": ["parallel:4"]}, 4),
        ({"options": ["parallel:4", "parallel:5"]}, 5),
        ({"options": ["parallel:4"], "engine_args": {"parallel": 2}}, 2),
        ({"options": ["parallel:many"]}, None),
        ({"address": "127.0.0.1:1"}, None),
        ({"backend": "/opt/other/run.sh"}, None),
    ],
)
def test_slots_are_read_from_the_model_file(settings: dict[str, Any], expected: int | None) -> None:
    assert slots(config(**settings)) == expected


@pytest.fixture
def gateway() -> Iterator[GatewayProcess]:
    """A gateway that has had no request for its model."""
    process = GatewayProcess({"tiny": tiny()})
    yield process
    process.close()


def test_reading_it_loads_nothing(gateway: GatewayProcess) -> None:
    for _ in range(3):
        status = gateway.client.get("/api/status").json()
    assert status["models"] == [
        {
            "name": "tiny",
            "state": "stopped",
            "running": 0,
            "slots": DEFAULT_SLOTS,
            "tokens_per_second": 0.0,
            "memory_bytes": 0,
            "context_size": 1024,
            "download_mib": None,
            "download_of_mib": None,
            "error": "",
        }
    ]
    assert gateway.backends() == []
