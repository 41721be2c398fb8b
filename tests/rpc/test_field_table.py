"""docs/fields.md has a row for every field of the wire, and says what the code does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from backend.rpc import extras, load_options, request_fields
from backend.rpc.field_table import EXTRAS, LOAD, PREDICT, render
from wire import backend_pb2 as pb

DOCUMENT = Path(__file__).parents[2] / "docs" / "fields.md"


@pytest.mark.parametrize(
    ("descriptor", "tables"),
    [
        (
            pb.PredictOptions.DESCRIPTOR,
            (PREDICT, request_fields.REFUSED, request_fields.UNUSED),
        ),
        (pb.ModelOptions.DESCRIPTOR, (LOAD, load_options.REFUSED, load_options.UNUSED)),
    ],
)
def test_every_field_has_exactly_one_row(
    descriptor: Any, tables: tuple[Mapping[str, object], ...]
) -> None:
    for field in descriptor.fields:
        found = [table for table in tables if field.name in table]
        assert len(found) == 1, f"{field.name} is in {len(found)} tables"
    known = {field.name for field in descriptor.fields}
    assert all(set(table) <= known for table in tables)


def test_every_extra_of_a_request_has_a_row() -> None:
    assert set(EXTRAS) == {extras.PREFIX + name for name in extras.READERS}


def test_the_document_holds_the_tables() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text.partition("<!-- tables -->\n")[2] == render()
