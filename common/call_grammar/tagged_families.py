"""Families that write each argument in its own tags, with the value as bare text.

Only the tool's schema gives the type of a value without quotes, by the rules of
`common/tool_schema.py`. So a grammar must not allow text that would be read as another type.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.call_grammar.lark_text import literals_of, shape_of
from common.call_grammar.rules import RuleBook, either, one_or_more
from common.call_grammar.tools import CallableTool, alternatives, check_name, resolved
from common.tool_schema import ToolSchemas

_NAME = r"[\w.:/-]+"
_KEY = r"""[^<>"'/=\s&]+"""


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """The tags of a family, with placeholders `{name}` and `{key}`, and line breaks.

    value_end: closes a value, perhaps with its `{key}`. forbidden: texts that no value may
    contain, so that no part of one is mistaken for markup. text_flag, other_flag: replace `{flag}`
    in a parameter's tag if its value is text, or not. breaks: line breaks are optional.
    """

    call: str
    call_end: str
    parameter: str
    value_end: str
    forbidden: tuple[str, ...]
    opening: str = ""
    separator: str = ""
    closing: str = ""
    text_flag: str = ""
    other_flag: str = ""
    breaks: bool = False

    def grammar(self, book: RuleBook, tools: Sequence[CallableTool], *, parallel: bool) -> str:
        call = either([self._call(book, tool) for tool in tools])
        separator = self._text(book, self.separator) or '""'
        calls = one_or_more(call, separator, several=parallel)
        return book.written(
            f"{self._text(book, self.opening)} {calls} {self._text(book, self.closing)}"
        )

    def _text(self, book: RuleBook, marker: str) -> str:
        if not self.breaks:
            return book.text(marker)
        return ' "\\n"? '.join(book.text(part) for part in marker.split("\n"))

    def _call(self, book: RuleBook, tool: CallableTool) -> str:
        name = check_name("tool's", tool.name, _NAME)
        parts = [self._text(book, self.call.replace("{name}", name))]
        for key, schema, required in tool.arguments():
            check_name("parameter's", key, _KEY)
            tags = replace(self, value_end=self.value_end.replace("{key}", key))
            argument = tags._argument(book, tool, key, schema)
            parts.append(argument if required else f"{argument}?")
        return book.rule(" ".join([*parts, self._text(book, self.call_end)]))

    def _argument(
        self, book: RuleBook, tool: CallableTool, key: str, schema: dict[str, Any]
    ) -> str:
        options = alternatives(schema)
        texts = [o for o in options if _is_text(o)]
        others = [o for o in options if not _is_text(o)]
        flagged = "{flag}" in self.parameter
        found: list[str] = []
        if texts and not (others and _only_literals(options)):
            mixed = [] if flagged else others
            value = self._text_value(book, tool, key, texts, mixed)
            found.append(f"{self._head(book, key, self.text_flag)} {value}")
        elif texts:
            found.append(
                f"{self._head(book, key, self.text_flag)} {self._literals(book, tool, key, texts)}"
            )
        if others and (flagged or not texts or _only_literals(options)):
            value = either([book.json(option) for option in others])
            end = self._text(book, self.value_end)
            found.append(f"{self._head(book, key, self.other_flag)} {value} {end}")
        return book.rule(" | ".join(found))

    def _head(self, book: RuleBook, key: str, flag: str) -> str:
        return self._text(book, self.parameter.replace("{key}", key).replace("{flag}", flag))

    def _text_value(
        self,
        book: RuleBook,
        tool: CallableTool,
        key: str,
        texts: Sequence[Any],
        others: Sequence[Any],
    ) -> str:
        """A rule for text that cannot be read as one of the schema's other types."""
        if all(literals_of(option) is not None for option in texts) and not others:
            return self._literals(book, tool, key, texts)
        also = [shape_of(option) for option in texts if not others]
        kinds = {str(option.get("type")) for option in others}
        without = ["~/\\s*[\\[{](?s:.*)/"] if kinds & {"object", "array"} else []
        if any(not _is_unbounded(option) for option in others) or kinds & {"integer", "number"}:
            without.append("~/\\s*[-+.0-9](?s:.*)/")
        shape = [f"({' | '.join(also)})"] if any(also) else []
        closing, line_break, rest = self.value_end, "", ""
        if self.breaks:
            closing, line_break, rest = self.value_end.partition("\n")
        value = book.text_until(closing, self.forbidden, *shape, *without)
        return f"{value} {self._text(book, line_break + rest)}"

    def _literals(self, book: RuleBook, tool: CallableTool, key: str, texts: Sequence[Any]) -> str:
        """Rules for the strings of an enumeration that are parsed as strings again."""
        schemas = ToolSchemas([{"name": tool.name, "parameters": tool.schema}])
        found = []
        for option in texts:
            for value in literals_of(option) or ():
                flagged = "{flag}" in self.parameter
                same = flagged or json.loads(schemas.typed(tool.name, key, value, "text")) == value
                if same and not any(marker in value for marker in self.forbidden):
                    found.append(f"{book.text(value)} {self._text(book, self.value_end)}")
        if not found:
            raise ValueError(
                f"no value of {key!r} of the tool {tool.name!r} can be written in this model's"
                " call format"
            )
        return either([book.rule(option) for option in found])


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


def _function_tags(opening: str, closing: str, value: str) -> TaggedCalls:
    """`<function=NAME><parameter=KEY>`, inside the family's own block."""
    return TaggedCalls(
        call=f"{opening}\n<function={{name}}>\n",
        call_end=f"</function>\n{closing}",
        parameter=f"<parameter={{key}}>{value}",
        value_end=f"{value}</parameter>\n",
        forbidden=("<function=", "</function>", "<parameter=", "</parameter>", opening, closing),
        separator="\n",
    )


_IS_TEXT = ("true", "false")


def _invoke_tags(prefix: str, block: str, value_flag: tuple[str, str] | None = None) -> TaggedCalls:
    """`<invoke name="NAME"><parameter name="KEY">` with a prefix, all calls in one block."""
    flag = ' string="{flag}"' if value_flag else ""
    return TaggedCalls(
        call=f'<{prefix}invoke name="{{name}}">\n',
        call_end=f"</{prefix}invoke>\n",
        parameter=f'<{prefix}parameter name="{{key}}"{flag}>',
        value_end=f"</{prefix}parameter>\n",
        forbidden=tuple(
            f"<{slash}{prefix}{tag}"
            for slash in ("", "/")
            for tag in ("invoke", "parameter", block)
        ),
        opening=f"<{prefix}{block}>\n",
        closing=f"</{prefix}{block}>",
        text_flag=value_flag[0] if value_flag else "",
        other_flag=value_flag[1] if value_flag else "",
    )


def _key_value_tags(prefix: str, suffix: str = "", **others: str) -> TaggedCalls:
    return TaggedCalls(
        call=f"<{prefix}tool_call{suffix}>{{name}}{others.get('after_name', '')}\n",
        call_end=f"</{prefix}tool_call{suffix}>",
        parameter=f"<{prefix}arg_key{suffix}>{{key}}</{prefix}arg_key{suffix}>\n"
        f"<{prefix}arg_value{suffix}>",
        value_end=f"</{prefix}arg_value{suffix}>\n",
        forbidden=tuple(
            f"<{slash}{prefix}{tag}{suffix}>"
            for slash in ("", "/")
            for tag in ("tool_call", "arg_key", "arg_value")
        ),
        opening=others.get("opening", ""),
        separator="\n",
        closing=others.get("closing", ""),
        breaks=True,
    )


QWEN_XML = _function_tags("<tool_call>", "</tool_call>", "\n")
SEED = _function_tags("<seed:tool_call>", "</seed:tool_call>", "")
MINIMAX = _invoke_tags("", "minimax:tool_call")
DOTS = _invoke_tags("", "dots_function_call")
GIGACHAT35 = _invoke_tags("｜GCML｜", "tool_calls", _IS_TEXT)
_STEP = _invoke_tags("steptml:", "")
STEP3 = replace(
    _STEP,
    call=f"<｜tool_call_begin｜>function<｜tool_sep｜>{_STEP.call}",
    call_end="</steptml:invoke><｜tool_call_end｜>",
    forbidden=(*_STEP.forbidden[:2], *_STEP.forbidden[3:5], "<｜tool_"),
    opening="<｜tool_calls_begin｜>",
    separator="",
    closing="<｜tool_calls_end｜>",
)
MUSE_SPARK = _invoke_tags("atem:", "function_calls")
MUSE_GLIMMER = replace(
    MUSE_SPARK,
    call=f" to={{name}}<|message|>{MUSE_SPARK.opening}{MUSE_SPARK.call}",
    call_end=MUSE_SPARK.call_end + MUSE_SPARK.closing,
    opening="",
    separator="<|eom|><|start|>assistant",
    closing="",
)
DSML_V32 = _invoke_tags("｜DSML｜", "function_calls", _IS_TEXT)
DSML_V4 = _invoke_tags("｜DSML｜", "tool_calls", _IS_TEXT)
DSML_V41 = _invoke_tags("｜DSML｜ ", "calls", _IS_TEXT)
GLM = _key_value_tags("")
LONGCAT = _key_value_tags("longcat_")
IQUEST = replace(
    GLM,
    call="<iquestcoder_tool_call>{name}\n",
    call_end="</iquestcoder_tool_call>",
    forbidden=(*GLM.forbidden, "<iquestcoder_tool_call>", "</iquestcoder_tool_call>"),
)
_HY = ("<tool_calls:opensource>\n", "\n</tool_calls:opensource>")
HY_V3 = _key_value_tags(
    "", ":opensource", after_name="<tool_sep:opensource>", opening=_HY[0], closing=_HY[1]
)
HY_V4 = _key_value_tags("", ":opensource", opening=_HY[0], closing=_HY[1])
K2_HORIZON = _key_value_tags("ifm|", opening="<ifm|tool_calls>", closing="</ifm|tool_calls>")
SOLAR2 = TaggedCalls(
    call="<|tool_call:start|>{name}\n",
    call_end="<|tool_call:end|>",
    parameter="<|tool_arg:start|>{key}<|tool_arg:value|>",
    value_end="<|tool_arg:end|>\n",
    forbidden=("<|tool_call:", "<|tool_arg:"),
    separator="\n",
)
MINICPM = TaggedCalls(
    call='<function name="{name}">',
    call_end="</function>",
    parameter='<param name="{key}">',
    value_end="</param>",
    forbidden=("<function", "</function>", "<param", "</param>", "<![CDATA["),
    separator="\n",
)
_M3 = "]<]minimax[>["
MINIMAX_M3 = TaggedCalls(
    call=f'{_M3}<invoke name="{{name}}">',
    call_end=f"{_M3}</invoke>\n",
    parameter=f"{_M3}<{{key}}>",
    value_end=f"{_M3}</{{key}}>",
    forbidden=(_M3,),
    opening=f"{_M3}<tool_call>\n",
    closing=f"{_M3}</tool_call>",
)
KIMI_K3 = TaggedCalls(
    call='<|open|>call tool="{name}"<|sep|>',
    call_end="<|close|>call<|sep|>",
    parameter='<|open|>argument key="{key}" type="{flag}"<|sep|>',
    value_end="<|close|>argument<|sep|>",
    forbidden=("<|open|>", "<|close|>", "<|sep|>"),
    opening="<|open|>tools<|sep|>",
    closing="<|close|>tools<|sep|>",
    text_flag="string",
    other_flag="object",
)
