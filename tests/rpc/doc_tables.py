"""Writes the tables of docs/fields.md: `python -m tests.rpc.doc_tables`.

What a field does is written in the document itself. Which fields are used, refused or without
effect, and the reasons, come from the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from backend.rpc.fields import MODEL_OPTIONS, PREDICT_OPTIONS
from backend.rpc.request_metadata import KEYS, PREFIX
from common.field_table import FieldTable
from wire import backend_pb2 as pb

DOCUMENT = Path(__file__).parents[2] / "docs" / "fields.md"
_MARK = "<!-- tables -->\n"
_FIELDS = "field | treatment"


def render(text: str) -> str:
    """The document, with its tables written again. Raises KeyError for a field without a row."""
    before, mark, _ = text.partition(_MARK)
    keys = ((f"{PREFIX}{name}", "") for name in KEYS)
    tables = (
        ("PredictOptions", _FIELDS, _rows(pb.PredictOptions, PREDICT_OPTIONS)),
        ("Metadata of a request", "key | meaning", keys),
        ("ModelOptions", _FIELDS, _rows(pb.ModelOptions, MODEL_OPTIONS)),
        ("TranscriptRequest", _FIELDS, _rows(pb.TranscriptRequest, FieldTable())),
    )
    return "\n".join([before + mark.rstrip(), *(_table(text, *table) for table in tables)])


def _rows(message: type[Any], table: FieldTable) -> Iterator[tuple[str, str]]:
    """Yield each field in message order, and its treatment if the code states it."""
    for name in (field.name for field in message.DESCRIPTOR.fields):
        if row := table.refused.get(name):
            yield name, f"**refused** unless it is {row.off.words}: {row.why}; {row.instead}"
        else:
            neutral = table.neutral.get(name)
            yield name, f"no effect: {neutral}" if neutral else ""


def _table(text: str, title: str, columns: str, rows: Iterable[tuple[str, str]]) -> str:
    """A table. An empty cell gets what the document says."""
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    written = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE))
    lines = (f"| `{name}` | {words or written[name]} |\n" for name, words in rows)
    return f"## {title}\n\n| {columns} |\n|---|---|\n{''.join(lines)}"


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text("utf-8")), "utf-8")
