"""Answers and events have every field that OpenAI's and Anthropic's own types require."""

from __future__ import annotations

from tests.clients.environments import python_program
from tests.gateway.gateway_process import GatewayProcess


def test_the_types_of_the_sdks(gateway: GatewayProcess) -> None:
    told = python_program("conformance", gateway.url)
    assert not told["wrong"], "\n".join(told["wrong"])
    assert told["checked"] > 200
