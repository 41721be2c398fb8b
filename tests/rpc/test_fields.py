"""docs/fields.md has a row for every field of the protocol, and agrees with the code."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from backend.engine.errors import InvalidRequest
from backend.engine.request import Extras
from backend.rpc.fields import MODEL_OPTIONS, PREDICT_OPTIONS
from backend.rpc.request_metadata import KEYS
from backend.rpc.requests import generation_request
from backend.rpc.statuses import status_of
from common.field_table import FieldTable
from tests.rpc.doc_tables import DOCUMENT, render
from tests.rpc.fake_engine import SERVED
from wire import backend_pb2 as pb


@pytest.mark.parametrize(
    ("wire", "message"), [(PREDICT_OPTIONS, pb.PredictOptions), (MODEL_OPTIONS, pb.ModelOptions)]
)
def test_every_row_is_of_a_field(wire: FieldTable, message: Any) -> None:
    rows = [*wire.refused, *wire.neutral]
    assert len(set(rows)) == len(rows)
    assert set(rows) <= {field.name for field in message.DESCRIPTOR.fields}
    assert all(words.strip() for words in wire.neutral.values())


def test_every_extra_field_of_a_request_has_a_metadata_key() -> None:
    assert set(KEYS) == {field.name for field in fields(Extras)}


def test_the_document_holds_the_tables() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == render(text)


def test_only_fields_that_the_code_uses_are_honoured() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for title, message, table in (
        ("PredictOptions", pb.PredictOptions, PREDICT_OPTIONS),
        ("ModelOptions", pb.ModelOptions, MODEL_OPTIONS),
    ):
        section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
        honoured = re.findall(r"^\| `(\w+)` \| \*\*honoured\*\*: .", section, re.MULTILINE)
        fields_of = {field.name for field in message.DESCRIPTOR.fields}
        assert set(honoured) == fields_of - table.refused.keys() - table.neutral.keys()


def test_the_examples_message_is_that_of_the_code() -> None:
    with pytest.raises(InvalidRequest) as refused:
        generation_request(pb.PredictOptions(Prompt="The sea is", Temperature=-1), SERVED)
    assert f"  Message: {status_of(refused.value).message}\n" in DOCUMENT.read_text("utf-8")
