"""Families that write a call's arguments as one JSON object, which follows the schema."""

from __future__ import annotations

import json
from collections.abc import Sequence

from common.call_grammar.rules import RuleBook, either, one_or_more
from common.call_grammar.tools import CallableTool, check_name
from common.formats.shapes import JsonShape

_NAME = r"[\w.:/-]+"  # a name that is not in a JSON string


def json_calls(
    shape: JsonShape, book: RuleBook, tools: Sequence[CallableTool], *, parallel: bool
) -> str:
    """Rules for calls whose arguments are one JSON object."""
    first, later = (
        either([_call(shape, book, tool, index) for tool in tools])
        for index in ("0", "/[1-9][0-9]{0,2}/")
    )
    separator = book.text(shape.separator) or '""'
    several = parallel and shape.several
    calls = f"{first} ({separator} {later})*" if several else first
    if "{index}" not in shape.call:
        calls = one_or_more(first, separator, several=several)
    return book.written(f"{book.text(shape.opening)} {calls} {book.text(shape.closing)}")


def _call(shape: JsonShape, book: RuleBook, tool: CallableTool, index: str) -> str:
    if shape.quoted:
        name = json.dumps(tool.name, ensure_ascii=False)
    else:
        name = check_name("tool's", tool.name, _NAME)
    head, _, tail = shape.call.partition("{arguments}")
    before, numbered, after = head.replace("{name}", name).partition("{index}")
    number = f'"{index}"' if index == "0" else index
    head = f"{book.text(before)} {number} {book.text(after)}" if numbered else book.text(before)
    return book.rule(f"{head} {book.json(tool.schema)} {book.text(tail)}")
