"""Families without tags around arguments: JSON, Python calls, and Gemma's notation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.call_grammar.lark_text import ANY_TEXT, shape_of
from common.call_grammar.rules import RuleBook, either, one_or_more, separated
from common.call_grammar.tools import CallableTool, alternatives, check_name
from common.formats.shapes import FencedShape, JsonShape, PythonShape

_NAME = r"[\w.:/-]+"  # a name that is not in a JSON string
_KEY = r"[^:,{}\[\]<>\s\"'=()]+"
_ESCAPES = 'nrt\\"'
"""The strings that JSON and Python share: Python knows neither `\\/` nor surrogates."""
_SCALARS = ({"type": "number"}, {"type": "boolean"}, {"type": "null"})


def json_calls(
    shape: JsonShape, book: RuleBook, tools: Sequence[CallableTool], *, parallel: bool
) -> str:
    """Return rules for calls whose arguments are one JSON object."""
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


def python_calls(
    shape: PythonShape, book: RuleBook, tools: Sequence[CallableTool], *, parallel: bool
) -> str:
    """Return rules for calls in the notation of Python."""
    call = either([_python_call(book, tool) for tool in tools])
    calls = one_or_more(call, book.text(shape.separator), several=parallel)
    return book.written(f"{book.text(shape.opening)} {calls} {book.text(shape.closing)}")


def _python_call(book: RuleBook, tool: CallableTool) -> str:
    name = check_name("tool's", tool.name, r"[A-Za-z_][\w.-]*")
    items = []
    for key, schema, required in tool.arguments():
        keyword = check_name("parameter's", key, r"[\w.-]+") + "="
        value = book.json(schema, json_allowed_escapes=_ESCAPES)
        items.append((f"{book.text(keyword)} {value}", required))
    inside = separated(book, items, '", "')
    return book.rule(f'"{name}(" {inside} ")"')


@dataclass
class _FencedValues:
    """Values in a JSON-like notation whose strings are raw text between two equal delimiters."""

    book: RuleBook
    fence: str
    _known: dict[str, str] = field(default_factory=dict)

    def value(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for a value; a recursive schema becomes a recursive rule."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._known:
            self._known[key] = name = self.book.reserve()
            self.book.define(name, " | ".join(map(self._one, alternatives(schema))))
        return self._known[key]

    def _one(self, schema: Mapping[str, Any]) -> str:
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(listed, list):
            return " | ".join(map(self._literal, listed))
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        match schema.get("type"):
            case "string":
                return self._string(schema)
            case "object":
                return self._object(schema, shared)
            case "array":
                items = schema.get("items", {})
                if not isinstance(items, Mapping):
                    raise ValueError(
                        "lists with a schema for each position cannot be enforced in this model's"
                        " call format"
                    )
                item = self.value({**shared, **items})
                return self._list(item, schema.get("minItems", 0), schema.get("maxItems"))
            case None:
                return " | ".join([self._string({}), *map(self.book.json, _SCALARS)])
        return self.book.json(schema)

    def _string(self, schema: Mapping[str, Any]) -> str:
        shape = shape_of(schema)
        also = () if shape == ANY_TEXT else (shape,)
        return f"{self.book.text(self.fence)} {self.book.text_until(self.fence, (), *also)}"

    def _literal(self, value: Any) -> str:
        if not isinstance(value, str):
            return self.book.json({"const": value})
        return self.book.text(f"{self.fence}{value}{self.fence}")

    def _object(self, schema: Mapping[str, Any], shared: Mapping[str, Any]) -> str:
        tool = CallableTool("", {"type": "object", "properties": {}, **schema, **shared})
        return self.members(tool)

    def members(self, tool: CallableTool) -> str:
        items = []
        for key, schema, required in tool.arguments():
            name = check_name("parameter's", key, _KEY)
            items.append((f"{self.book.text(f'{name}:')} {self.value(schema)}", required))
        inside = separated(self.book, items, '","')
        return f'"{{" {inside} "}}"'

    def _list(self, item: str, least: int, most: int | None) -> str:
        if most == 0:
            return '"[]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        whole = f'"[" {item} ("," {item}){more} "]"'
        return whole if least else f'"[]" | {whole}'


def fenced_calls(
    shape: FencedShape, book: RuleBook, tools: Sequence[CallableTool], *, parallel: bool
) -> str:
    """Return rules for calls with raw strings between two equal delimiters."""
    values = _FencedValues(book, shape.fence)
    calls = []
    for tool in tools:
        name = check_name("tool's", tool.name, r"[\w.:-]+")
        calls.append(
            book.rule(
                f"{book.text(f'{shape.opening}call:{name}')} {values.members(tool)}"
                f" {book.text(shape.closing)}"
            )
        )
    return book.written(one_or_more(either(calls), '""', several=parallel))
