"""docs/fields.md has a row for every field of the protocol, and agrees with the code."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from backend.engine.errors import InvalidRequest
from backend.engine.request import Extras
from backend.rpc.fields import MODEL_OPTIONS, PREDICT_OPTIONS, TRANSCRIPT_REQUEST, render
from backend.rpc.request_metadata import KEYS
from backend.rpc.requests import generation_request
from backend.rpc.statuses import status_of
from common.field_table import FieldTable
from tests.rpc.fake_engine import SERVED
from wire import backend_pb2 as pb

DOCUMENT = Path(__file__).parents[2] / "docs" / "fields.md"


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (PREDICT_OPTIONS, pb.PredictOptions),
        (MODEL_OPTIONS, pb.ModelOptions),
        (TRANSCRIPT_REQUEST, pb.TranscriptRequest),
    ],
)
def test_every_field_has_exactly_one_row(wire: FieldTable, message: Any) -> None:
    rows = [*wire.used, *wire.refused, *wire.neutral]
    assert sorted(rows) == sorted(field.name for field in message.DESCRIPTOR.fields)
    assert all(words.strip() for words in (*wire.used.values(), *wire.neutral.values()))


def test_every_extra_field_of_a_request_has_a_metadata_key() -> None:
    assert set(KEYS) == {field.name for field in fields(Extras)}


def test_the_document_holds_the_tables() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text.partition("<!-- tables -->\n")[2] == render()


def test_the_examples_message_is_that_of_the_code() -> None:
    with pytest.raises(InvalidRequest) as refused:
        generation_request(pb.PredictOptions(Prompt="The sea is", Temperature=-1), SERVED)
    assert f"  Message: {status_of(refused.value).message}\n" in DOCUMENT.read_text("utf-8")
