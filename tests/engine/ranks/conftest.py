"""A fixture of the ranks' tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def turns() -> None:
    """Nothing takes turns: ranks are processes, and one that waits for another must run at once."""
