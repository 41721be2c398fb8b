"""One loaded backend for the tests that leave it as they found it, and a bare one for the rest."""

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
