"""Answers and events have every field that OpenAI's and Anthropic's own types require."""

from __future__ import annotations

from tests.clients.environments import python_program
from tests.gateway.gateway_process import GatewayProcess


def test_the_types_of_the_sdks(gateway: GatewayProcess) -> None:
    results = python_program("conformance", gateway.url)
    assert not results["wrong"], "\n".join(results["wrong"])
    assert results["checked"] > 200
