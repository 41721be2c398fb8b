"""A backend with a model loaded, for tests that leave it unchanged, and others without a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acceptance.backend import Backend


@pytest.fixture
def fresh() -> Iterator[Backend]:
    """A process for this test alone, which may end it."""
    backend = Backend()
    yield backend
    backend.close()


@pytest.fixture(scope="package")
def reused() -> Iterator[Backend]:
    """A process for the models of all tests that use `holding`, and for `bare`."""
    backend = Backend()
    yield backend
    assert backend.close() == 0


@pytest.fixture
def bare(reused: Backend) -> Backend:
    """A process without a model and without running calls, which other tests use too."""
    reused.free()
    reused.log.clear()
    return reused


@pytest.fixture(scope="package")
def served() -> Iterator[Backend]:
    backend = Backend()
    backend.load()
    yield backend
    assert backend.close() == 0
