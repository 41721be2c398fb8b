"""The call grammar for each chat format; its shape is also what the parser is made from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.call_grammar.rules import (
    ANY_TEXT,
    RuleBook,
    SpecialTokens,
    either,
    literals_of,
    separated,
    shape_of,
)
from common.call_grammar.tools import CallableTool, alternatives, check_name, shared_of
from common.formats.families import BY_NAME
from common.formats.shapes import FencedShape, JsonShape, PythonShape, Shape, TagShape
from common.formats.tool_schema import ToolSchemas, types_of
from common.wording import shown

FAMILIES: Mapping[str, Shape] = {
    name: family.shape for name, family in BY_NAME.items() if family.shape
}
"""How calls are written, by the name of the format."""
_NOTHING = '""'
_ESCAPES = 'nrt\\"'
"""The strings that JSON and Python share: Python knows neither `\\/` nor surrogates."""
_SCALARS = ({"type": "number"}, {"type": "boolean"}, {"type": "null"})
_PLACE = re.compile(r"(\{index\}|\{arguments\})")
_FIRST = '"0"'
_LATER = "/[1-9][0-9]{0,2}/"  # the numbers of the calls after the first one


def json_call(shape: JsonShape, book: RuleBook, tool: CallableTool, *, first: bool = True) -> str:
    """Return a rule for a call whose arguments are one JSON object."""
    if shape.quoted:
        name = json.dumps(tool.name, ensure_ascii=False)
    else:
        name = check_name("tool's", tool.name, r"[\w.:/-]+")
    if shape.in_string:
        raise ValueError(
            "tool calls cannot be enforced with this model, because it writes arguments in a JSON"
            " string: require no call and mark no tool as strict"
        )
    arguments = _pairs(shape.pair, book, tool) if shape.pair else book.json(tool.schema)
    values = {"{index}": _FIRST if first else _LATER, "{arguments}": arguments}
    parts = _PLACE.split(shape.call.replace("{name}", name))
    return book.rule(" ".join(values.get(part) or book.text(part) for part in parts))


def _pairs(pair: str, book: RuleBook, tool: CallableTool) -> str:
    """Return a rule for a list of arguments, each as an object with its key and its value."""
    items = []
    for key, schema, required in tool.arguments():
        head, _, tail = pair.replace("{key}", json.dumps(key)).partition("{value}")
        items.append((f"{book.text(head)} {book.json(schema)} {book.text(tail)}", required))
    return f'"[" {separated(book, items, book.text(", "))} "]"'


def _members(
    book: RuleBook,
    tool: CallableTool,
    keys: str,
    sign: str,
    value: Callable[[Mapping[str, Any]], str],
    separator: str,
) -> str:
    """Return a rule for arguments in order.

    keys: a pattern for the possible keys.
    sign: the text behind a key.
    """
    items = []
    for key, schema, required in tool.arguments():
        head = check_name("parameter's", key, keys) + sign
        items.append((f"{book.text(head)} {value(schema)}", required))
    return separated(book, items, separator)


def python_call(book: RuleBook, tool: CallableTool) -> str:
    """Return a rule for a call in the notation of Python."""

    def value(schema: Mapping[str, Any]) -> str:
        return book.json(schema, json_allowed_escapes=_ESCAPES)

    name = check_name("tool's", tool.name, r"[A-Za-z_][\w.-]*")
    inside = _members(book, tool, r"[\w.-]+", "=", value, '", "')
    return book.rule(f'"{name}(" {inside} ")"')


def fenced_call(shape: FencedShape, book: RuleBook, tool: CallableTool) -> str:
    """Return a rule for a call with raw strings between two equal delimiters."""
    name = check_name("tool's", tool.name, r"[\w.:-]+")
    inside = _FencedValues(book, shape.fence).members(tool)
    return book.rule(
        f"{book.text(f'{shape.opening}call:{name}')} {inside} {book.text(shape.closing)}"
    )


@dataclass(frozen=True, slots=True)
class _FencedValues:
    """Values in a JSON-like notation whose strings are raw text between two equal delimiters."""

    book: RuleBook
    fence: str

    def value(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for a value; a recursive schema becomes a recursive rule."""
        key = json.dumps(schema, sort_keys=True)
        name, known = self.book.reserve(key)
        if not known:
            self.book.define(name, " | ".join(map(self._alternative, alternatives(schema))))
        return name

    def members(self, tool: CallableTool) -> str:
        inside = _members(self.book, tool, r"[^:,{}\[\]<>\s\"'=()]+", ":", self.value, '","')
        return f'"{{" {inside} "}}"'

    def _alternative(self, schema: Mapping[str, Any]) -> str:
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(listed, list):
            return " | ".join(map(self._literal, listed))
        match schema.get("type"):
            case "string":
                return self._string(schema)
            case "object":
                whole = {"type": "object", "properties": {}, **schema, **shared_of(schema)}
                return self.members(CallableTool("", whole))
            case "array":
                return self._list(schema)
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

    def _list(self, schema: Mapping[str, Any]) -> str:
        items, least, most = (
            schema.get("items", {}),
            schema.get("minItems", 0),
            schema.get("maxItems"),
        )
        if not isinstance(items, Mapping):
            raise ValueError(
                "lists with a schema for each position cannot be enforced in this model's call"
                " format"
            )
        if most == 0:
            return '"[]"'
        item = self.value({**shared_of(schema), **items})
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        whole = f'"[" {item} ("," {item}){more} "]"'
        return whole if least else f'"[]" | {whole}'


def tagged_call(shape: TagShape, book: RuleBook, tool: CallableTool) -> str:
    """Return a rule for a call with each argument in its own tags, and the value as bare text.

    Only the tool's schema gives the type of a value without quotes, by the rules of
    `common/formats/tool_schema.py`. So a value must not be text that would be read as another type.
    """
    name = check_name("tool's", tool.name, r"[\w.:/-]+")
    parts = [tag_text(shape, book, shape.call.replace("{name}", name))]
    for key, schema, required in tool.arguments():
        check_name("parameter's", key, r"""[^<>"'/=\s&]+""")
        argument = _TaggedArgument(shape, book, tool, key).rule(alternatives(schema))
        parts.append(argument if required else f"{argument}?")
    parts.append(tag_text(shape, book, shape.call_end.replace("{name}", name)))
    return book.rule(" ".join(parts))


def tag_text(shape: Shape, book: RuleBook, marker: str) -> str:
    """Return a rule for a marker, in which line breaks may be optional."""
    if not (isinstance(shape, TagShape) and shape.breaks):
        return book.text(marker)
    return ' "\\n"? '.join(book.text(part) for part in marker.split("\n"))


@dataclass(frozen=True, slots=True)
class _TaggedArgument:
    """Writes the rule for an argument in tags."""

    shape: TagShape
    book: RuleBook
    tool: CallableTool
    key: str

    @property
    def value_end(self) -> str:
        return self.shape.value_end.replace("{key}", self.key)

    @property
    def flagged(self) -> bool:
        return "{flag}" in self.shape.parameter

    def rule(self, options: Sequence[Mapping[str, Any]]) -> str:
        all_json = self.shape.undeclared == "json"
        texts = [o for o in options if not all_json and _is_text(o)]
        others = [o for o in options if all_json or not _is_text(o)]
        listed = all("enum" in o or "const" in o or o.get("type") == "null" for o in options)
        found: list[str] = []
        if texts and others and listed:
            found.append(self._argument(0, self._literals(texts)))
        elif texts:
            found.append(self._argument(0, self._value(texts, [] if self.flagged else others)))
        if others and (self.flagged or not texts or listed):
            value = either([self.book.json(option) for option in others])
            found.append(self._argument(1, f"{value} {self._text(self.value_end)}"))
        return self.book.rule(" | ".join(found))

    def _text(self, marker: str) -> str:
        return tag_text(self.shape, self.book, marker)

    def _argument(self, flag: int, value: str) -> str:
        head = self.shape.parameter.replace("{key}", self.key)
        return f"{self._text(head.replace('{flag}', self.shape.flags[flag]))} {value}"

    def _value(self, texts: Sequence[Any], others: Sequence[Any]) -> str:
        """Return a rule for text that cannot be read as one of the schema's other types."""
        if all(literals_of(option) is not None for option in texts) and not others:
            return self._literals(texts)
        also = [shape_of(option) for option in texts if not others]
        kinds = {str(option.get("type")) for option in others}
        without = ["~/\\s*[\\[{](?s:.*)/"] if kinds & {"object", "array"} else []
        if any(not _is_unbounded(option) for option in others) or kinds & {"integer", "number"}:
            without.append("~/\\s*[-+.0-9](?s:.*)/")
        shape = [f"({' | '.join(also)})"] if any(also) else []
        closing, line_break, rest = self.value_end, "", ""
        if self.shape.breaks:
            closing, line_break, rest = closing.partition("\n")
        value = self.book.text_until(closing, self.shape.markup, *shape, *without)
        return f"{value} {self._text(line_break + rest)}"

    def _literals(self, texts: Sequence[Any]) -> str:
        """Return rules for the strings of an enumeration that are parsed as strings again."""
        name, end = self.tool.name, self._text(self.value_end)
        schemas = ToolSchemas([{"name": name, "parameters": self.tool.schema}])
        found = [
            f"{self.book.text(value)} {end}"
            for option in texts
            for value in literals_of(option) or ()
            if self.flagged or json.loads(schemas.typed(name, self.key, value, "text")) == value
            if not any(marker in value for marker in self.shape.markup)
        ]
        if not found:
            raise ValueError(
                f"no value of {shown(self.key)} of the tool {shown(name)} can be written in this"
                " model's call format"
            )
        return either([self.book.rule(option) for option in found])


def _is_text(option: Any) -> bool:
    types = types_of(option, option)
    return types <= {"string"} and not option.keys() & {"additionalProperties", "minimum", "allOf"}


def _is_unbounded(option: Any) -> bool:
    return option.get("type") in ("null", "boolean") and not literals_of(option)


def writes_hermes_calls(format_name: str) -> bool:
    """Return whether the format's calls are JSON between <tool_call> and </tool_call>."""
    return FAMILIES.get(format_name) == FAMILIES["hermes"]


def call_grammar(
    format_name: str,
    tools: Sequence[CallableTool],
    markers: SpecialTokens,
    json_options: Mapping[str, Any],
    *,
    parallel: bool,
    shape: Shape | None = None,
) -> str:
    """Return a Lark grammar with the rule `start` for one call, or with `parallel` for one or more.

    Raises ValueError, with an explanation, for a format or a tool that cannot be enforced.

    json_options: llguidance's options for JSON in the grammar.
    shape: the shape of calls of a format without a name.
    """
    if not tools:
        raise ValueError("there is no tool to call")
    family = BY_NAME.get(format_name)
    shape = shape or (family.shape if family else None)
    if family and family.by_token and markers.has(family.by_token[0]):
        shape = family.by_token[1]
    if shape is None:
        raise ValueError(
            "tool calls cannot be enforced with this model: its answers have the format"
            f" {format_name}, which has no grammar for calls; require no call and mark no tool as"
            " strict, or load the model with another tool_parser"
        )
    book = RuleBook(markers, json_options)
    around, several = ("", "", ""), parallel
    if isinstance(shape, TagShape) and shape.each:
        shape = shape.alone
    if not isinstance(shape, FencedShape):
        around = (shape.opening, shape.separator, shape.closing)
    if isinstance(shape, JsonShape):
        several = parallel and shape.several
    opening, separator, closing = (tag_text(shape, book, text) for text in around)
    later = call = either([_call(shape, book, tool) for tool in tools])
    if isinstance(shape, JsonShape):
        later = either([json_call(shape, book, tool, first=False) for tool in tools])
    calls = f"{call} ({separator or _NOTHING} {later})*" if several else call
    return book.written(f"{opening} {calls} {closing}")


def _call(shape: Shape, book: RuleBook, tool: CallableTool) -> str:
    match shape:
        case JsonShape():
            return json_call(shape, book, tool)
        case PythonShape():
            return python_call(book, tool)
        case FencedShape():
            return fenced_call(shape, book, tool)
        case TagShape():
            return tagged_call(shape, book, tool)
