"""docs/faults.md agrees with the fault tests, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine.fault_table import EDGES, render

TESTS = Path(__file__).parents[1]
PROOFS = [edge.test for edges in EDGES.values() for edge in edges]


def test_the_document_contains_the_table() -> None:
    assert (TESTS.parent / "docs" / "faults.md").read_text(encoding="utf-8") == render()


@pytest.mark.parametrize("proof", PROOFS)
def test_each_row_has_its_test(proof: str) -> None:
    file, _, name = proof.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (TESTS / file).read_text(), re.MULTILINE)
