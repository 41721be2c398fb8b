"""One browser for all tests of the page, and a gateway whose model has one slot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from tests.clients.environments import PATIENCE
from tests.gateway.gateway_process import GatewayProcess, roomy
from tests.gateway.page import browser


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the time to install the browser, because any of them may be the first."""
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):  # ten times as fast as `is_relative_to`
            item.add_marker(pytest.mark.timeout(2 * PATIENCE))


@pytest.fixture(scope="package")
def chrome() -> Iterator[Chrome]:
    """Closed after this folder's tests, because others count the processes below them."""
    driver = browser.launch()
    yield driver
    driver.quit()


@pytest.fixture(scope="package")
def gateway(chrome: Chrome) -> Iterator[GatewayProcess]:
    one_slot = roomy(options=["parallel:1"])
    process = GatewayProcess({"tiny": one_slot})
    yield process
    process.close()


@pytest.fixture
def page(chrome: Chrome, gateway: GatewayProcess) -> Iterator[browser.Page]:
    """The page with a fresh profile; an error in the browser's log fails the test."""
    shown = browser.Page(chrome, gateway.url)
    shown.open(model="tiny", temperature="0")
    yield shown
    assert shown.problems() == []
