"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from backend.engine import scheduler


@pytest.fixture
def small_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual charge for a grammar is more than all the KV of the small models, and the grammars
    of some tests need nothing."""
    monkeypatch.setattr(scheduler, "_MATCHER_BYTES", 0)
