"""The parser reads back what a family's template renders: any text, any arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat_format import ChatFormat
from tests.common.chat_replay import parse_every_split, plain
from tests.common.corpus import tool
from tests.long import examples

Arguments = dict[str, Any]
Render = Callable[[str, str, list[tuple[str, Arguments]]], str]

MARKUP = [
    "</tool_call>",
    "<think>",
    "</think>",
    "<|end|>",
    "[TOOL_CALLS]",
    "\n",
    '"',
    "\\",
    "}",
    "`",
]
TEXT = st.lists(st.sampled_from(MARKUP) | st.text(max_size=5), max_size=6).map("".join)
KEYS = st.text("abcdefgh_", min_size=1, max_size=5)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["ferry_times", "tide-now", "a.b_2"])
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=3)), max_size=3)
PROSE = st.text("abc é😀,.\n", max_size=20).map(str.strip)
TOOLS = [tool(name) for name in ("ferry_times", "tide-now", "a.b_2")]


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(reasoning: str, content: str, calls: list[tuple[str, Arguments]]) -> str:
    blocks = [
        f"<tool_call>\n{_dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    ]
    return f"<think>\n{reasoning}\n</think>\n\n" + "\n".join([content, *blocks])


def deepseek_v31(reasoning: str, content: str, calls: list[tuple[str, Arguments]]) -> str:
    inside = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    section = f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>" if calls else ""
    return f"<think>{reasoning}</think>{content}{section}"


def kimi_k2(reasoning: str, content: str, calls: list[tuple[str, Arguments]]) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{_dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    section = f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>" if calls else ""
    return f"<think>{reasoning}</think>{content}{section}"


def mistral(reasoning: str, content: str, calls: list[tuple[str, Arguments]]) -> str:
    inside = "".join(f"[TOOL_CALLS]{name}[ARGS]{_dumps(arguments)}" for name, arguments in calls)
    return f"[THINK]{reasoning}[/THINK]{content}{inside}"


def openai(reasoning: str, content: str, calls: list[tuple[str, Arguments]]) -> str:
    messages = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"]
    messages += [f"<|channel|>commentary<|message|>{content}<|end|>"] if content else []
    messages += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{_dumps(arguments)}<|call|>"
        for name, arguments in calls
    ]
    return "<|start|>assistant".join(messages)


def kimi_k3(reasoning: str, content: str, calls: list[tuple[str, Arguments]]) -> str:
    def argument(key: str, value: Any) -> str:
        kind = "string" if isinstance(value, str) else "object"
        text = value if isinstance(value, str) else _dumps(value)
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'

    inside = "".join(
        f'<|open|>call tool="{name}" index="{index}"<|sep|>'
        + "".join(argument(key, value) for key, value in arguments.items())
        + "<|close|>call<|sep|>"
        for index, (name, arguments) in enumerate(calls, 1)
    )
    section = f"<|open|>tools<|sep|>{inside}<|close|>tools<|sep|>" if calls else ""
    return (
        f"<|open|>think<|sep|>{reasoning}<|close|>think<|sep|>"
        f"<|open|>response<|sep|>{content}<|close|>response<|sep|>{section}"
    )


def gemma4(reasoning: str, content: str, calls: list[tuple[str, Arguments]]) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{written(v)}" for k, v in value.items()) + "}"
        return _dumps(value)

    inside = "".join(f"<|tool_call>call:{name}{written(a)}<tool_call|>" for name, a in calls)
    return f"<|channel>thought\n{reasoning}\n<channel|>{content}{inside}"


def deepseek_v32(reasoning: str, content: str, calls: list[tuple[str, Arguments]]) -> str:
    def parameter(key: str, value: Any) -> str:
        is_text = isinstance(value, str)
        return (
            f'<｜DSML｜parameter name="{key}" string="{str(is_text).lower()}">'
            f"{value if is_text else _dumps(value)}</｜DSML｜parameter>\n"
        )

    inside = "\n".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(parameter(key, value) for key, value in arguments.items())
        + "</｜DSML｜invoke>"
        for name, arguments in calls
    )
    section = f"\n\n<｜DSML｜function_calls>\n{inside}\n</｜DSML｜function_calls>" if calls else ""
    return f"<think>{reasoning}</think>{content}{section}"


def cohere(reasoning: str, content: str, calls: list[tuple[str, Arguments]]) -> str:
    entries = [
        _dumps({"tool_call_id": str(index), "tool_name": name, "parameters": arguments})
        for index, (name, arguments) in enumerate(calls)
    ]
    action = f"<|START_ACTION|>[\n{','.join(entries)}\n]<|END_ACTION|>" if calls else ""
    answer = f"<|START_RESPONSE|>{content}<|END_RESPONSE|>" if content else ""
    return f"<|START_THINKING|>{reasoning}<|END_THINKING|>{answer}{action}"


def apertus(reasoning: str, content: str, calls: list[tuple[str, Arguments]]) -> str:
    entries = ", ".join(_dumps({name: arguments}) for name, arguments in calls)
    action = f"<|tools_prefix|>[{entries}]<|tools_suffix|>" if calls else ""
    return f"<|inner_prefix|>{reasoning}<|inner_suffix|>{content}{action}"


def solar_open(reasoning: str, content: str, calls: list[tuple[str, Arguments]]) -> str:
    start = "<|end|><|begin|>assistant"
    inside = "".join(
        f"<|tool_call:begin|>a1b2c3d4e{index}<|tool_call:name|>{name}<|tool_call:args|>"
        f"{_dumps(arguments)}<|tool_call:end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    action = f"{start}<|tool_calls|>{inside}<|calls|>" if calls else "<|flush|>"
    return f"<|think|>{reasoning}{start}<|content|>{content}{action}"


def pythonic(_reasoning: str, content: str, calls: list[tuple[str, Arguments]]) -> str:
    inside = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"{content}\n[{inside}]" if calls else content


@pytest.mark.parametrize(
    ("name", "render"),
    [
        (render.__name__, render)
        for render in (
            hermes, deepseek_v31, deepseek_v32, kimi_k2, kimi_k3, mistral, openai, gemma4, cohere,
            apertus, pythonic, solar_open,
        )
    ],
)  # fmt: skip
@given(reasoning=PROSE, content=PROSE, calls=CALLS)
@settings(max_examples=examples(60))
def test_it_reads_back_what_was_rendered(
    name: str, render: Render, reasoning: str, content: str, calls: list[tuple[str, Arguments]]
) -> None:
    text = render(reasoning, content, calls)
    message = parse_every_split(ChatFormat.named(name), text, tools=TOOLS, count=1)
    thought = "" if render is pythonic else reasoning
    assert plain(message) == (content, thought, calls)


TYPED = (
    st.tuples(st.just("string"), TEXT)
    | st.tuples(st.just("integer"), st.integers())
    | st.tuples(st.just("number"), st.floats(allow_nan=False, allow_infinity=False))
    | st.tuples(st.just("boolean"), st.booleans())
    | st.tuples(st.just("array"), st.lists(VALUES, max_size=3))
    | st.tuples(st.just("object"), st.dictionaries(KEYS, VALUES, max_size=3))
)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else _dumps(value)


def qwen3_xml(name: str, arguments: Arguments) -> str:
    inside = "".join(
        f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def glm45(name: str, arguments: Arguments) -> str:
    inside = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{inside}</tool_call>"


def minimax_m2(name: str, arguments: Arguments) -> str:
    inside = "".join(
        f'<parameter name="{key}">{_bare(value)}</parameter>\n' for key, value in arguments.items()
    )
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{inside}</invoke>\n</minimax:tool_call>'


def minimax_m3(name: str, arguments: Arguments) -> str:
    mark = "]<]minimax[>["

    def element(key: str, value: Any) -> str:
        if isinstance(value, dict) and value:
            inside = "".join(element(inner, each) for inner, each in value.items())
        elif isinstance(value, list) and value:
            inside = "".join(element("item", each) for each in value)
        else:
            inside = _bare(value)
        return f"{mark}<{key}>{inside}{mark}</{key}>"

    inside = "".join(element(key, value) for key, value in arguments.items())
    call = f'{mark}<invoke name="{name}">{inside}{mark}</invoke>\n'
    return f"{mark}<tool_call>\n{call}{mark}</tool_call>"


@pytest.mark.parametrize("render", [qwen3_xml, glm45, minimax_m2])
@given(typed=st.dictionaries(KEYS, TYPED, max_size=4))
@settings(max_examples=examples(80))
def test_it_reads_back_untyped_text_by_the_schema(
    render: Callable[[str, Arguments], str], typed: dict[str, tuple[str, Any]]
) -> None:
    arguments = {key: value for key, (_, value) in typed.items()}
    # its template writes values without line breaks, and its parsers strip one
    if render is minimax_m2:
        arguments = {k: v.strip("\n") if isinstance(v, str) else v for k, v in arguments.items()}
    tools = [tool("f", **{key: kind for key, (kind, _) in typed.items()})]
    text = render("f", arguments)
    message = parse_every_split(ChatFormat.named(render.__name__), text, tools=tools, count=1)
    assert plain(message) == ("", "", [("f", arguments)])


LEAVES = st.tuples(st.just("string"), TEXT) | st.tuples(st.just("integer"), st.integers())
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.tuples(st.just("object"), st.dictionaries(KEYS, inner, max_size=3))
        | st.tuples(st.just("array"), st.lists(LEAVES, max_size=1).map(lambda one: one * 2))
    ),
    max_leaves=6,
)


def _nested(typed: tuple[str, Any]) -> tuple[dict[str, Any], Any]:
    """The schema of a value whose members have types, and the value."""
    kind, value = typed
    if kind == "object":
        inner = {key: _nested(each) for key, each in value.items()}
        properties = {key: schema for key, (schema, _) in inner.items()}
        return {"type": kind, "properties": properties}, {key: v for key, (_, v) in inner.items()}
    if kind == "array":
        entries = [_nested(each) for each in value]
        return {"type": kind, "items": entries[0][0] if entries else {}}, [v for _, v in entries]
    return {"type": kind}, value


@given(typed=st.dictionaries(KEYS, NESTED, max_size=3))
@settings(max_examples=examples(80))
def test_it_reads_back_nested_elements(typed: dict[str, tuple[str, Any]]) -> None:
    schemas = {key: _nested(each) for key, each in typed.items()}
    arguments = {key: value for key, (_, value) in schemas.items()}
    tools = [tool("f", **{key: schema for key, (schema, _) in schemas.items()})]
    text = minimax_m3("f", arguments)
    message = parse_every_split(ChatFormat.named("minimax_m3"), text, tools=tools, count=1)
    assert plain(message) == ("", "", [("f", arguments)])
