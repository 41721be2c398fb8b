"""Whatever a call grammar allows is parsed as calls that satisfy the schemas of the tools."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.errors import InvalidRequest
from common.call_grammar.calls import FAMILIES
from common.chat_format import ChatFormat
from common.chat_parser import parse_chat
from common.formats.families import BY_NAME
from common.formats.shapes import TagShape
from tests.common.grammar_walks import ByteTokenizer, byte_tokenizer
from tests.common.test_families import WITH_CALLS, written
from tests.engine.constraints.walks import allowed_ids, byte_walk, quick_compiler_for
from tests.long import TEST_LONG

SPECIAL: dict[str, tuple[str, ...]] = {
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    "deepseek_v32": ("｜DSML｜",),
    "deepseek_v41": ("｜DSML｜",),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "openai": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ),
    "solar_open": (
        *("<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>"),
        *("<|tool_call:end|>", "<|calls|>"),
    ),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "phi4_mini_json": ("<|tool_call|>", "<|/tool_call|>"),
    "granite": ("<|tool_call|>",),
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "apertus": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "internlm": ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    "inkling": ("<|content_invoke_tool_json|>", "<|end_message|>"),
    "hermes": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
}
SPECIAL["deepseek_v31"] = SPECIAL["deepseek_v3"]
PLAIN = {"hermes": SPECIAL["hermes"], "qwen3_xml": SPECIAL["hermes"], "glm45": SPECIAL["glm45"]}


CLOSERS = {
    "qwen3_xml": "\n</parameter>\n",
    "seed_oss": "</parameter>\n",
    "minimax_m2": "</parameter>\n",
    "deepseek_v32": "</｜DSML｜parameter>\n",
    "deepseek_v4": "</｜DSML｜parameter>\n",
    "deepseek_v41": "</｜DSML｜ parameter>\n",
    "minimax_m3": "]<]minimax[>[</",
    "muse_spark": "</atem:parameter>\n",
    "muse_glimmer": "</atem:parameter>\n",
    "minicpm5": "</param>",
    "glm45": "</arg_value>",
    "longcat": "</longcat_arg_value>",
    "gemma4": '<|"|>',
    "function_gemma": "<escape>",
    "kimi_k3": "<|close|>argument<|sep|>",
    "dots": "</parameter>\n",
    "gigachat35": "</｜GCML｜parameter>\n",
    "step3": "</steptml:parameter>\n",
    "hy_v3": "</arg_value:opensource>",
    "hy_v4": "</arg_value:opensource>",
    "iquest_coder_v2": "</arg_value>",
    "k2_horizon": "</ifm|arg_value>",
    "solar_open2": "<|tool_arg:end|>",
}


def _tool(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TEXT = {"type": "string", "maxLength": 12}
TOOLS_OFFERED: tuple[dict[str, Any], ...] = (
    _tool(
        "ferry_times",
        ["harbour", "day"],
        harbour=TEXT,
        day={"type": "integer", "minimum": 1, "maximum": 31},
        size={"enum": ["small", "large", "7"]},
        open={"type": "boolean"},
    ),
    _tool(
        "ferry",
        ["where"],
        where={
            "type": "object",
            "properties": {"x": {"type": "number"}, "names": {"type": "array", "items": TEXT}},
            "required": ["x", "names"],
            "additionalProperties": False,
        },
        note={"anyOf": [{"type": "string"}, {"type": "null"}]},
        count={"type": ["integer", "null"]},
    ),
    {"type": "function", "function": {"name": "tide_now", "parameters": None}},
)


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    for tool in TOOLS_OFFERED:
        if tool["function"]["name"] == name:
            parameters: dict[str, Any] = tool["function"]["parameters"] or {"maxProperties": 0}
            schema = {**parameters, "additionalProperties": False}
            jsonschema.Draft202012Validator.check_schema(schema)
            return jsonschema.Draft202012Validator(schema)
    raise AssertionError(name)


def _families() -> list[tuple[str, ByteTokenizer]]:
    cases = [(name, byte_tokenizer(markers)) for name, markers in SPECIAL.items()]
    cases += [(name, byte_tokenizer(plain=markers)) for name, markers in PLAIN.items()]
    bare = byte_tokenizer()
    kinds = {id(family): name for name, family in reversed(list(FAMILIES.items()))}
    return [*cases, *((name, bare) for name in kinds.values())]


@pytest.mark.parametrize(("name", "tokenizer"), _families())
def test_every_family_s_calls_are_parsed_back(name: str, tokenizer: ByteTokenizer) -> None:
    chat_format = ChatFormat.named(name)
    compiler = quick_compiler_for(tokenizer, chat_format)
    called = set()
    for seed in range(6) if TEST_LONG else (0, 3, 4, 5):
        tools = TOOLS_OFFERED if seed < 3 else TOOLS_OFFERED[seed - 3 : seed - 2]
        spec = ConstraintSpec("calls", tools=tools, parallel=seed == 0)
        text = byte_walk(tokenizer, seed, CLOSERS.get(name, "}")).text(compiler.compile(spec))
        message = parse_chat(text, chat_format, tools=TOOLS_OFFERED)
        assert message.tool_calls, text
        assert message.content == message.reasoning_content == "", text
        for call in message.tool_calls:
            called.add(call.name)
            _validator(call.name).validate(json.loads(call.arguments))
    assert called == {"ferry_times", "ferry", "tide_now"}


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml", "mistral", "pythonic"])
def test_keywords_that_are_null_count_as_absent(name: str) -> None:
    """Programs in Go and .NET write null for a list or an object that was not set."""
    harbour = {"type": "string", "enum": None, "items": None, "anyOf": None}
    nothing = {"const": None, "enum": None, "title": None}
    parameters = {
        "type": None,
        "properties": {"harbour": harbour, "enum": {"type": "boolean", "enum": None}, "x": nothing},
        "required": ["harbour", "enum", "x"],
        "$defs": None,
        "additionalProperties": None,
    }
    bare = {"type": "object", "properties": None, "required": None}
    tools = tuple(
        {"type": "function", "function": {"name": tool, "parameters": schema}}
        for tool, schema in (("ferry", parameters), ("tide_now", bare))
    )
    tokenizer = byte_tokenizer()
    chat_format = ChatFormat.named(name)
    for tool in tools:
        spec = ConstraintSpec("calls", tools=(tool,), parallel=False)
        constraint = quick_compiler_for(tokenizer, chat_format).compile(spec)
        text = byte_walk(tokenizer, 1, CLOSERS.get(name, "}")).text(constraint)
        (call,) = parse_chat(text, chat_format, tools=tools).tool_calls
        if tool is tools[0]:
            found = json.loads(call.arguments)
            assert found.keys() == {"harbour", "enum", "x"}
            assert found["x"] is None


def test_every_name_of_a_format_has_a_grammar() -> None:
    assert set(FAMILIES) == set(BY_NAME) - {"plain", "none"}


def test_only_one_call_if_several_are_not_allowed() -> None:
    tokenizer = byte_tokenizer()
    chat_format = ChatFormat.named("hermes")
    compiler = quick_compiler_for(tokenizer, chat_format)
    spec = ConstraintSpec("calls", tools=TOOLS_OFFERED[2:], parallel=False)
    constraint = compiler.compile(spec)
    text = byte_walk(tokenizer, 1).text(constraint)
    assert len(parse_chat(text, chat_format, tools=TOOLS_OFFERED).tool_calls) == 1
    assert constraint.ended


def test_a_format_without_calls_is_refused() -> None:
    tokenizer = byte_tokenizer()
    compiler = quick_compiler_for(tokenizer, ChatFormat.named("plain"))
    with pytest.raises(InvalidRequest, match="cannot be enforced with this model"):
        compiler.compile(ConstraintSpec("calls", tools=TOOLS_OFFERED))


@pytest.mark.parametrize("name", ["hermes", "openai", "kimi_k3", "mistral"])
def test_a_response_format_applies_to_content_without_calls(name: str) -> None:
    tokenizer = byte_tokenizer(SPECIAL[name])
    chat_format = ChatFormat.named(name)
    compiler = quick_compiler_for(tokenizer, chat_format)
    tail = "<|start|>assistant" if name == "openai" else ""
    answer = ConstraintSpec("json_schema", '{"enum": ["answer"]}')
    spec = ConstraintSpec("calls", tools=TOOLS_OFFERED[2:], optional=True, answer=answer)
    seen = set()
    for seed in range(20):
        constraint = compiler.compile(spec, prompt_tail=tail, answers_messages=True, thinking=False)
        text = byte_walk(tokenizer, seed, CLOSERS.get(name, "}")).text(constraint)
        message = parse_chat(text, chat_format, tools=TOOLS_OFFERED, prompt_tail=tail)
        assert (message.content == '"answer"') != bool(message.tool_calls), text
        seen.add(bool(message.tool_calls))
    assert seen == {True, False}


def test_a_response_format_that_cannot_be_enforced_beside_calls_is_named() -> None:
    compiler = quick_compiler_for(byte_tokenizer(SPECIAL["hermes"]), ChatFormat.named("hermes"))
    answer = ConstraintSpec("regex", "(")
    spec = ConstraintSpec("calls", tools=TOOLS_OFFERED[2:], optional=True, answer=answer)
    with pytest.raises(InvalidRequest, match="the regular expression cannot be enforced"):
        compiler.compile(spec, answers_messages=True)


@pytest.mark.parametrize("name", sorted({family.names.split()[0] for family in WITH_CALLS}))
def test_each_value_of_an_enumeration_of_several_types_is_parsed_back(name: str) -> None:
    values = ["cash", "crédit", 3, None, True]
    tool = _tool("pay", ["with"], **{"with": {"enum": values}})
    compiler = quick_compiler_for(byte_tokenizer(), chat_format := ChatFormat.named(name))
    for seed in range(5):
        spec = ConstraintSpec("calls", tools=(tool,), parallel=False)
        text = byte_walk(byte_tokenizer(), seed, "}").text(compiler.compile(spec))
        (call,) = parse_chat(text, chat_format, tools=[tool]).tool_calls
        assert json.loads(call.arguments)["with"] in values, text


TAGGED = {
    family.names.split()[0]: family.shape
    for family in WITH_CALLS
    if isinstance(family.shape, TagShape) and family.shape.call_end.strip()
}


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_the_special_token_that_ends_a_call_may_follow_the_text_that_ends_a_value(
    name: str,
) -> None:
    ends = {tag for shape in TAGGED.values() for tag in shape.call_end.split()}
    tokenizer = byte_tokenizer(tuple(sorted(ends)))
    compiler = quick_compiler_for(tokenizer, ChatFormat.named(name))
    tool = _tool("pay", ["with"], **{"with": {"type": "string"}})
    constraint = compiler.compile(ConstraintSpec("calls", tools=(tool,), parallel=False))
    text = written(TAGGED[name], [("pay", {"with": "cash"})])
    for token in tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids:
        assert token in allowed_ids(constraint, tokenizer.size), tokenizer.text([token])
        constraint.accept(token)
    assert tokenizer.end in allowed_ids(constraint, tokenizer.size)
