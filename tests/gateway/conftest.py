"""One gateway with the small trained model, for tests that leave it unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.exchange import Exchange
from tests.gateway.asking import chat
from tests.gateway.gateway_process import GatewayProcess, tiny
from tests.gateway.requests_begun import begun


@pytest.fixture(scope="package")
def gateway() -> Iterator[GatewayProcess]:
    process = GatewayProcess({"tiny": tiny(aliases=["gpt-4o-mini"])})
    chat(process)  # A stream that waits for a load begins before its prompt is checked.
    yield process
    process.close()


@pytest.fixture(scope="package")
def strict_gateway() -> Iterator[GatewayProcess]:
    """A gateway with --strict."""
    process = GatewayProcess({"tiny": tiny()}, "--strict")
    chat(process)
    yield process
    process.close()


@pytest.fixture(autouse=True)
def no_request() -> None:
    """No test sees the current request of an earlier one."""
    begun()


@pytest.fixture
def strict() -> Exchange:
    """A running request of a gateway with --strict."""
    return begun(strict=True)
