"""docs/fields.md has a row for every field of the protocol, and agrees with the code."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from backend.engine.request import Extras
from backend.rpc.fields import MODEL_OPTIONS, PREDICT_OPTIONS, Fields, render
from backend.rpc.request_metadata import KEYS

DOCUMENT = Path(__file__).parents[2] / "docs" / "fields.md"


@pytest.mark.parametrize("wire", [PREDICT_OPTIONS, MODEL_OPTIONS])
def test_every_field_has_exactly_one_row(wire: Fields) -> None:
    rows = [*wire.honoured, *wire.refused, *wire.unused]
    assert sorted(rows) == sorted(field.name for field in wire.message.DESCRIPTOR.fields)
    assert all(words.strip() for words in (*wire.honoured.values(), *wire.unused.values()))


def test_every_extra_field_of_a_request_has_a_metadata_key() -> None:
    assert set(KEYS) == {field.name for field in fields(Extras)}


def test_the_document_holds_the_tables() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text.partition("<!-- tables -->\n")[2] == render()
