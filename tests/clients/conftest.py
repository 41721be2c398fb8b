"""The gateway for the clients, and a time limit that allows for their installation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.clients.environments import PATIENCE
from tests.gateway.conftest import gateway

__all__ = ["gateway"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the time to install its client, because any of them may be the first."""
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):  # ten times as fast as `is_relative_to`
            item.add_marker(pytest.mark.timeout(2 * PATIENCE))
