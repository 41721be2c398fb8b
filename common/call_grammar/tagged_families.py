"""Families that write each argument in its own tags, with the value as bare text.

Only the tool's schema gives the type of a value without quotes, by the rules of
`common/formats/tool_schema.py`. So a grammar must not allow text that would be read as another
type.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.call_grammar.lark_text import literals_of, shape_of
from common.call_grammar.rules import RuleBook, either, one_or_more
from common.call_grammar.tools import CallableTool, alternatives, check_name, resolved
from common.formats.shapes import TagShape
from common.formats.tool_schema import ToolSchemas
from common.wording import shown

_NAME = r"[\w.:/-]+"
_KEY = r"""[^<>"'/=\s&]+"""


def tagged_calls(
    shape: TagShape, book: RuleBook, tools: Sequence[CallableTool], *, parallel: bool
) -> str:
    """Return rules for calls whose arguments have tags of their own."""
    if shape.each:
        shape = replace(
            shape,
            call=shape.opening + shape.call,
            call_end=shape.call_end + shape.closing,
            opening="",
            closing="",
            forbidden=shape.markup,
        )
    return _TaggedCalls(book, shape, shape.markup).grammar(tools, parallel=parallel)


@dataclass(frozen=True, slots=True)
class _TaggedCalls:
    """Writes the rules.

    forbidden: texts that no value may contain.
    """

    book: RuleBook
    shape: TagShape
    forbidden: tuple[str, ...]

    def grammar(self, tools: Sequence[CallableTool], *, parallel: bool) -> str:
        shape = self.shape
        call = either([self._call(tool) for tool in tools])
        calls = one_or_more(call, self._text(shape.separator) or '""', several=parallel)
        return self.book.written(f"{self._text(shape.opening)} {calls} {self._text(shape.closing)}")

    def _text(self, marker: str) -> str:
        if not self.shape.breaks:
            return self.book.text(marker)
        return ' "\\n"? '.join(self.book.text(part) for part in marker.split("\n"))

    def _call(self, tool: CallableTool) -> str:
        name = check_name("tool's", tool.name, _NAME)
        parts = [self._text(self.shape.call.replace("{name}", name))]
        for key, schema, required in tool.arguments():
            check_name("parameter's", key, _KEY)
            value_end = self.shape.value_end.replace("{key}", key)
            tags = replace(self, shape=replace(self.shape, value_end=value_end))
            argument = tags._argument(tool, key, schema)
            parts.append(argument if required else f"{argument}?")
        return self.book.rule(" ".join([*parts, self._text(self.shape.call_end)]))

    def _argument(self, tool: CallableTool, key: str, schema: dict[str, Any]) -> str:
        options = alternatives(schema)
        texts = [o for o in options if _is_text(o)]
        others = [o for o in options if not _is_text(o)]
        flagged = "{flag}" in self.shape.parameter
        found: list[str] = []
        if texts and not (others and _only_literals(options)):
            mixed = [] if flagged else others
            value = self._text_value(tool, key, texts, mixed)
            found.append(f"{self._head(key, self.shape.flags[0])} {value}")
        elif texts:
            found.append(
                f"{self._head(key, self.shape.flags[0])} {self._literals(tool, key, texts)}"
            )
        if others and (flagged or not texts or _only_literals(options)):
            value = either([self.book.json(option) for option in others])
            end = self._text(self.shape.value_end)
            found.append(f"{self._head(key, self.shape.flags[1])} {value} {end}")
        return self.book.rule(" | ".join(found))

    def _head(self, key: str, flag: str) -> str:
        return self._text(self.shape.parameter.replace("{key}", key).replace("{flag}", flag))

    def _text_value(
        self, tool: CallableTool, key: str, texts: Sequence[Any], others: Sequence[Any]
    ) -> str:
        """Return a rule for text that cannot be read as one of the schema's other types."""
        if all(literals_of(option) is not None for option in texts) and not others:
            return self._literals(tool, key, texts)
        also = [shape_of(option) for option in texts if not others]
        kinds = {str(option.get("type")) for option in others}
        without = ["~/\\s*[\\[{](?s:.*)/"] if kinds & {"object", "array"} else []
        if any(not _is_unbounded(option) for option in others) or kinds & {"integer", "number"}:
            without.append("~/\\s*[-+.0-9](?s:.*)/")
        shape = [f"({' | '.join(also)})"] if any(also) else []
        closing, line_break, rest = self.shape.value_end, "", ""
        if self.shape.breaks:
            closing, line_break, rest = self.shape.value_end.partition("\n")
        value = self.book.text_until(closing, self.forbidden, *shape, *without)
        return f"{value} {self._text(line_break + rest)}"

    def _literals(self, tool: CallableTool, key: str, texts: Sequence[Any]) -> str:
        """Return rules for the strings of an enumeration that are parsed as strings again."""
        schemas = ToolSchemas([{"name": tool.name, "parameters": tool.schema}])
        found = []
        for option in texts:
            for value in literals_of(option) or ():
                flagged = "{flag}" in self.shape.parameter
                same = flagged or json.loads(schemas.typed(tool.name, key, value, "text")) == value
                if same and not any(marker in value for marker in self.forbidden):
                    found.append(f"{self.book.text(value)} {self._text(self.shape.value_end)}")
        if not found:
            raise ValueError(
                f"no value of {shown(key)} of the tool {shown(tool.name)} can be written in this"
                " model's call format"
            )
        return either([self.book.rule(option) for option in found])


def _only_literals(options: Sequence[Any]) -> bool:
    return all("enum" in o or "const" in o or o.get("type") == "null" for o in options)


def _is_text(option: Any) -> bool:
    option = resolved(option)
    if "type" in option:
        return bool(option["type"] == "string")
    listed = option.get("enum", [option["const"]] if "const" in option else None)
    if listed is not None:
        return all(isinstance(value, str) for value in listed)
    return not option.keys() & {"properties", "items", "additionalProperties", "minimum", "allOf"}


def _is_unbounded(option: Any) -> bool:
    return option.get("type") in ("null", "boolean") and not literals_of(option)
