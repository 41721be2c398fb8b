"""One gateway with the small trained model, for the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.gateway_process import GatewayProcess, tiny


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    process = GatewayProcess({"tiny": tiny(aliases=["gpt-4o-mini"])})
    yield process
    process.close()
