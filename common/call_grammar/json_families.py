"""Families that write a call's arguments as one JSON object, which follows the schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from common.call_grammar.rules import RuleBook, either, one_or_more
from common.call_grammar.tools import CallableTool, check_name


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """The text around the arguments. `{name}` is the tool's name, `{index}` the call's number.

    quoted: the name is in a JSON string. pattern: names that the family can write without quotes.
    """

    head: str
    tail: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    quoted: bool = True
    pattern: str = r"[\w.:/-]+"
    several: bool = True

    def grammar(self, book: RuleBook, tools: Sequence[CallableTool], *, parallel: bool) -> str:
        first, later = (
            either([self._call(book, tool, index) for tool in tools])
            for index in ("0", "/[1-9][0-9]{0,2}/")
        )
        separator = book.text(self.separator) or '""'
        calls = f"{first} ({separator} {later})*"
        if not parallel or not self.several:
            calls = first
        if "{index}" not in self.head:
            calls = one_or_more(first, separator, several=parallel and self.several)
        return book.written(f"{book.text(self.opening)} {calls} {book.text(self.closing)}")

    def _call(self, book: RuleBook, tool: CallableTool, index: str) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)
        if not self.quoted:
            name = check_name("tool's", tool.name, self.pattern)
        before, numbered, after = self.head.replace("{name}", name).partition("{index}")
        number = f'"{index}"' if index == "0" else index
        head = f"{book.text(before)} {number} {book.text(after)}" if numbered else book.text(before)
        return book.rule(f"{head} {book.json(tool.schema)} {book.text(self.tail)}")


_OBJECT = '{"name": {name}, "arguments": '
HERMES = JsonCalls(f"<tool_call>\n{_OBJECT}", "}\n</tool_call>", separator="\n")
LLAMA = JsonCalls('{"name": {name}, "parameters": ', "}", separator="; ")
MISTRAL_LIST = JsonCalls(_OBJECT, "}", "[TOOL_CALLS][", ", ", "]")
MISTRAL_ARGS = JsonCalls("[TOOL_CALLS]{name}[ARGS]", "", quoted=False)
GRANITE = JsonCalls(_OBJECT, "}", "<|tool_call|>[", ", ", "]")
GRANITE_20B = JsonCalls(f"<function_call> {_OBJECT}", "}", separator="\n")
PHI4 = JsonCalls(_OBJECT, "}", "<|tool_call|>[", ", ", "]<|/tool_call|>")
JAMBA = JsonCalls(_OBJECT, "}", "<tool_calls>[", ", ", "]</tool_calls>")
NEMOTRON = JsonCalls(_OBJECT, "}", "<TOOLCALL>[", ", ", "]</TOOLCALL>")
FUNCTIONARY_31 = JsonCalls("<function={name}>", "</function>", quoted=False)
FUNCTIONARY = JsonCalls(
    "{name}\n", "", separator="\n>>>", quoted=False
)  # the prompt already ends with >>>
FIREFUNCTION = JsonCalls(_OBJECT, "}", "functools[", ", ", "]")
XLAM = JsonCalls(_OBJECT, "}", "[", ", ", "]")
INTERNLM = JsonCalls(
    '<|action_start|><|plugin|>\n{"name": {name}, "parameters": ', "}<|action_end|>", several=False
)
GIGACHAT3 = JsonCalls(f"<|function_call|>{_OBJECT}", "}", several=False)
HYPERCLOVA = JsonCalls(_OBJECT, "}", " -> tool/function_call\n[", ", ", "]")
SARASHINA = JsonCalls(_OBJECT, "}", "<|tool_calls|>[", ", ", "]")
PANGU = JsonCalls(_OBJECT, "}", "[unused11][", ", ", "][unused12]")
INKLING = JsonCalls('<|content_invoke_tool_json|>{"name": {name}, "args": ', "}<|end_message|>")
COMMAND_R = JsonCalls(
    '{"tool_name": {name}, "parameters": ', "}", "Action: ```json\n[", ",\n", "]\n```"
)
PLAMO = JsonCalls(
    "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}"
    "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
    "<|plamo:constrain|>json<|plamo:msg|>",
    "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
    "<|plamo:begin_tool_requests:plamo|>",
    "",
    "<|plamo:end_tool_requests:plamo|>",
    quoted=False,
)
COHERE = JsonCalls(
    '{"tool_call_id": "{index}", "tool_name": {name}, "parameters": ',
    "}",
    "<|START_ACTION|>[",
    ", ",
    "]<|END_ACTION|>",
)
APERTUS = JsonCalls("{{name}: ", "}", "<|tools_prefix|>[", ", ", "]<|tools_suffix|>")
DEEPSEEK_V3 = JsonCalls(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "",
    "<｜tool▁calls▁end｜>",
    quoted=False,
)
DEEPSEEK_V31 = JsonCalls(
    "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "",
    "<｜tool▁calls▁end｜>",
    quoted=False,
)
SOLAR = JsonCalls(
    "<|tool_call:begin|>{index}<|tool_call:name|>{name}<|tool_call:args|>",
    "<|tool_call:end|>",
    "<|tool_calls|>",
    closing="<|calls|>",
    quoted=False,
)
KIMI_K2 = JsonCalls(
    "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "",
    "<|tool_calls_section_end|>",
    quoted=False,
)
HARMONY = JsonCalls(
    "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
    "",
    quoted=False,
    several=False,  # the token that ends a call ends the answer
)
