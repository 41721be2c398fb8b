"""A backend with a model loaded, for tests that leave it unchanged, and one without a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acceptance.backend import Backend


@pytest.fixture
def bare() -> Iterator[Backend]:
    backend = Backend()
    yield backend
    backend.close()


@pytest.fixture(scope="package")
def served() -> Iterator[Backend]:
    backend = Backend()
    backend.load()
    yield backend
    assert backend.close() == 0
