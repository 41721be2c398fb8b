"""A fixture of the architectures' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.taking_turns import taking_turns


@pytest.fixture(scope="module", autouse=True)
def turns() -> Iterator[None]:
    """MLX computes within this process."""
    with taking_turns():
        yield
