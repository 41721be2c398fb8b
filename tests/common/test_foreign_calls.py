"""Calls in the form of another family, in a code block, or bare, in every family."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat_events import message_of
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser, parse_chat
from common.formats.families import BY_NAME, FAMILIES
from common.formats.family import THINK, Family
from common.formats.harmony import Harmony
from common.formats.shapes import PythonShape, TagShape, invoked
from tests.common.chat_replay import parse_every_split, plain
from tests.common.corpus import TOOLS, Call, tool
from tests.common.test_families import written
from tests.long import examples

FERRY: Call = ("ferry_times", {"harbour": "Ærø"})
TIDE: Call = ("tide_now", {})
READERS = [f for f in FAMILIES if f.shape and not isinstance(f.grammar, Harmony)]
PYTHON = [family for family in READERS if isinstance(family.shape, PythonShape)]


def _object(call: Call, arguments: str = "arguments") -> str:
    return json.dumps({"name": call[0], arguments: call[1]}, ensure_ascii=False)


def _nested(key: str, value: Any) -> str:
    return json.dumps({key: value}, ensure_ascii=False)


_OBJECT = _object(FERRY)
_INVOKED = '<invoke name="ferry_times">\n<parameter name="harbour">Ærø</parameter>\n</invoke>'
MARKED = {
    "Hermes": f"<tool_call>\n{_OBJECT}\n</tool_call>",
    "Qwen3-Coder": "<tool_call>\n<function=ferry_times>\n<parameter=harbour>\nÆrø\n</parameter>\n"
    "</function>\n</tool_call>",
    "GLM": "<tool_call>ferry_times\n<arg_key>harbour</arg_key>\n<arg_value>Ærø</arg_value>\n"
    "</tool_call>",
    "Anthropic": f"<function_calls>\n{_INVOKED}\n</function_calls>",
    "an invocation in Qwen's block": f"<tool_call>\n{_INVOKED}\n</tool_call>",
    "an invocation alone": _INVOKED,
    "Mistral": f"[TOOL_CALLS][{_OBJECT}]",
    "Mistral, later": '[TOOL_CALLS]ferry_times[ARGS]{"harbour": "Ærø"}',
    "Llama": f"<|python_tag|>{_object(FERRY, 'parameters')}",
    "LFM2": "<|tool_call_start|>[ferry_times(harbour='Ærø')]<|tool_call_end|>",
    "Granite": f"<|tool_call|>[{_OBJECT}]",
    "Nemotron": f"<TOOLCALL>[{_OBJECT}]</TOOLCALL>",
    "Gemma": '<|tool_call>call:ferry_times{harbour:<|"|>Ærø<|"|>}<tool_call|>',
    "DeepSeek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ferry_times\n"
    '```json\n{"harbour": "Ærø"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "Kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.ferry_times:0"
    '<|tool_call_argument_begin|>{"harbour": "Ærø"}<|tool_call_end|><|tool_calls_section_end|>',
    "tools": f"<tools>\n{_OBJECT}\n</tools>",
    "tool_calls": f"<tool_calls>[{_OBJECT}]</tool_calls>",
    "function_call": f"<function_call>{_OBJECT}</function_call>",
    "tool_code": "```tool_code\nprint(ferry_times(harbour='Ærø'))\n```",
}
UNMARKED = {
    "a code block": f"```json\n{_OBJECT}\n```",
    "a code block without a language": f"```\n{_OBJECT}\n```",
    "a list": f"[{_OBJECT}]",
    "Python": "[ferry_times(harbour='Ærø')]",
    "tool_calls": _nested("tool_calls", [{"name": FERRY[0], "arguments": FERRY[1]}]),
    "OpenAI's objects": _nested(
        "tool_calls",
        [{"type": "function", "function": {"name": FERRY[0], "arguments": json.dumps(FERRY[1])}}],
    ),
    "an action": json.dumps({"action": FERRY[0], "action_input": FERRY[1]}, ensure_ascii=False),
}
ALONE = {"Python without a list": "ferry_times(harbour='Ærø')"}
TEXTS = {
    "an example in a code block": f"Like this:\n```json\n{_OBJECT}\n```\nTry it.",
    "a code block at the end": f"Like this:\n```json\n{_OBJECT}\n```",
    "an example": f"I could write\n{_OBJECT}\nhere.",
    "inline code": f"Write `<tool_call>{_OBJECT}</tool_call>` or `ferry_times(harbour='Ærø')`.",
    "marked in a sentence": f"I would write {_INVOKED} here.",
    "a signature": "ferry_times(harbour) asks for a harbour.",
    "a program": "```python\ndef ferry_times(harbour):\n    return 1\n```",
    "data": '{"name": "Ærø", "day": "today"}',
    "data in a list": '[{"harbour": "Ærø"}, {"harbour": "Moss"}]',
    "data in a code block": '```json\n{"name": "Ærø"}\n```',
    "signatures": "ferry_times(harbour, day)\ntide_now()",
    "a typed signature": "ferry_times(harbour: str, day: str)",
    "a tool's description": '{"name": "tide_now", "parameters": {"type": "object", "x": []}}',
    "a description at the end": 'So:\n{"name": "tide_now", "parameters": {"properties": {}}}',
    "an example in a code block for calls": f"So:\n```tool_call\n{_OBJECT}\n```\nTry it.",
    "a quotation": f'He wrote "<tool_call>{_OBJECT}</tool_call>".',
    "another tool": f"<TOOLCALLS>{_OBJECT.replace('ferry', 'bus')}</TOOLCALLS>",
    "another tool in a code block": f"So:\n```json\n{_OBJECT.replace('ferry', 'bus')}\n```",
    "only a word in tags": "A <tool_call> and </tool_call> surround it.",
}


OWN = {
    "xlam": ["an example", *(why for why in TEXTS if why.startswith(("an example", "a code")))],
    **{name: ["marked in a sentence"] for name in ("minimax_m2", "dots")},
    **{
        name: ["an example", "a quotation"]
        for name in ("llama3_json", "llama4_pythonic", "lfm2", "olmo3")
    },
}
"""What is a call in the family's own form, or is read as one by other servers too."""


def _read(family: Family, text: str, **others: Any) -> tuple[str, str, list[Call]]:
    format_ = ChatFormat.named(family.names.split()[0])
    return plain(parse_every_split(format_, text, count=1, **{"tools": TOOLS, **others}))


def _ids(family: Family) -> str:
    return family.title


@pytest.mark.parametrize("family", READERS, ids=_ids)
def test_calls_in_other_forms_are_read(family: Family) -> None:
    for text in (*MARKED.values(), *UNMARKED.values(), *ALONE.values()):
        assert _read(family, text) == ("", "", [FERRY]), text
    for text in (*MARKED.values(), UNMARKED["a list"]):
        assert _read(family, f"Hm.\n{text}") == ("Hm.", "", [FERRY]), text
    both = f"```json\n{_OBJECT}\n```\n```json\n{_object(TIDE)}\n```"
    assert _read(family, both) == ("", "", [FERRY, TIDE])
    assert _read(family, "ferry_times(harbour='Ærø')\ntide_now()") == ("", "", [FERRY, TIDE])


@pytest.mark.parametrize("family", READERS, ids=_ids)
def test_an_argument_ends_before_the_next_one_in_the_tags_of_another_family(
    family: Family,
) -> None:
    call: Call = ("ferry_times", {"harbour": "Ærø", "day": "today"})
    with_undeclared: Call = (call[0], {**call[1], "line": "A"})
    for name in ("qwen3_xml", "deepseek_v32", "minimax_m2", "minicpm5", "muse_spark"):
        shape = BY_NAME[name].shape
        assert isinstance(shape, TagShape)
        text = written(shape, [call, TIDE]).replace("｜DSML｜", "")
        assert _read(family, text) == ("", "", [call, TIDE]), text
    for prefix in ("", "antml:"):
        text = written(invoked(prefix, "function_calls"), [with_undeclared, TIDE])
        assert _read(family, text) == ("", "", [with_undeclared, TIDE]), text


@pytest.mark.parametrize("family", READERS, ids=_ids)
def test_what_only_looks_like_a_call_is_text(family: Family) -> None:
    own = OWN.get(family.names.split()[0], ())
    for why, text in TEXTS.items():
        if why not in own:
            assert _read(family, text) == (text, "", []), why
    for text in (*MARKED.values(), *UNMARKED.values(), *ALONE.values()):
        assert _read(family, text, tools=[])[2] == [], text


@pytest.mark.parametrize("family", READERS, ids=_ids)
def test_a_call_ends_reasoning_that_was_left_open(family: Family) -> None:
    tags = family.grammar.tags
    if not tags or tags[0].opening != "<think>":
        return
    own = written(family.shape, [FERRY]) if family.shape else ""
    for text in (own, MARKED["Hermes"]):
        assert _read(family, f"<think>\nSo.\n{text}") == ("", "So.", [FERRY]), text


@pytest.mark.parametrize("family", READERS, ids=_ids)
def test_a_call_of_another_family_in_closed_reasoning_is_text(family: Family) -> None:
    if family.grammar.tags[:1] != (THINK,):
        return
    for text in (MARKED["Hermes"], MARKED["Anthropic"], MARKED["Mistral"]):
        if not any(opener in text for opener in family.grammar.openers):
            reasoning = f"Like this:\n{text}"
            assert _read(family, f"<think>\n{reasoning}\n</think>Hm.") == ("Hm.", reasoning, [])


@pytest.mark.parametrize("opener", ["\n[[", "\n{", "\n[{", '{"calls": [', "```\n", "\n<tool_call>"])
def test_repeated_openers_are_text(opener: str) -> None:
    """Also if they are nested deeper than Python's call stack."""
    format_ = ChatFormat.named("hermes")
    text = opener * (60_000 // len(opener))
    assert parse_chat(text, format_, tools=TOOLS).tool_calls == []


@pytest.mark.parametrize("family", READERS, ids=_ids)
@pytest.mark.parametrize(
    "text", ["```\n{}\n```", "Use <tool_call> tags. {}", "<tools>\n{}\n</tools>"]
)
def test_text_after_what_may_open_a_call_is_not_held_back(family: Family, text: str) -> None:
    parser = ChatParser(ChatFormat.named(family.names.split()[0]), tools=TOOLS)
    words = "and then some words " * 20
    shown = parser.feed(text.partition("{")[0] + words)
    assert words[:-40] in message_of(shown).content


@pytest.mark.parametrize("family", PYTHON, ids=_ids)
def test_families_of_python_read_its_code_blocks(family: Family) -> None:
    for text in ("ferry_times(harbour='Ærø')", "x = ferry_times(harbour='Ærø')\nprint(x)"):
        assert _read(family, f"```python\n{text}\n```") == ("", "", [FERRY])
    for before, after in (("So:\n```python\n", "\n```"), ("def ferry_times(): ...\n", "")):
        text = f"{before}ferry_times(harbour='Ærø'){after}"
        assert _read(family, text) == (text, "", [])


@pytest.mark.parametrize(
    "name", ["Ferry_Times", "ferryTimes", "ferry-times", "boats__ferry_times", "FERRY_TIMES"]
)
def test_another_spelling_of_a_name_means_the_only_tool_like_it(name: str) -> None:
    for family in READERS:
        text = written(family.shape, [FERRY]).replace("ferry_times", name) if family.shape else ""
        tail = ">>>" if family.title == "Functionary 3.2" else ""
        if not (tail or family.by_token):
            assert _read(family, text, tail=tail) == ("", "", [FERRY]), family.title


def test_a_name_that_two_tools_have_in_other_spellings_means_neither() -> None:
    both = [{"name": "boats.tide_now"}, {"name": "harbours.tide_now"}]
    text = f"<tool_call>{_object(TIDE)}</tool_call>"
    format_ = ChatFormat.named("hermes")
    assert plain(parse_every_split(format_, text, tools=both))[2] == [TIDE]
    only: list[Call] = [("boats.tide_now", {})]
    assert plain(parse_every_split(format_, text, tools=both[:1]))[2] == only
    other = text.replace("tide_now", "harbours.tide_now")
    assert plain(parse_every_split(format_, other, tools=both[:1]))[2] == [
        ("harbours.tide_now", {})
    ]


@pytest.mark.parametrize(
    "text",
    [
        "{“name”: “ferry_times”, “arguments”: {“harbour”: “Ærø”}}",
        '{"name": "ferry_times", "arguments": {"harbour": “Ærø”}}',
        '{"name": "ferry_times", // when\n"arguments": {"harbour": "Ærø" /* here */}}',
        '{"name": "ferry_times", "kwargs": {"harbour": "Ærø"},}',
        '{"function_name": "ferry_times", "tool_input": {"harbour": "Ærø"}}',
        '{"tool_call": {"name": "ferry_times", "arguments": {"harbour": "Ærø"}}}',
        '{"calls": [{"tool": "ferry_times", "params": {"harbour": "Ærø"}}]}',
    ],
)
def test_json_with_other_quotes_comments_and_keys(text: str) -> None:
    for names in ("hermes", "llama3_json", "mistral", "xlam"):
        family = next(f for f in FAMILIES if names in f.names.split())
        marked = f"<tool_call>{text}</tool_call>" if names == "hermes" else text
        assert _read(family, marked) == ("", "", [FERRY])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama4_pythonic", "[ferry_times(harbour: 'Ærø')]"),
        ("llama4_pythonic", "[ferry_times({'harbour': 'Ærø'})]"),
        ("lfm2", "<|tool_call_start|>[ferry_times(**{'harbour': 'Ærø'})]<|tool_call_end|>"),
        ("llama3_json", '<function=ferry_times{"harbour": "Ærø"}</function>'),
        ("mistral", f"[TOOL_CALLS]\n```json\n[{_OBJECT}]\n```"),
        ("hermes", f"```tool_call\n{_OBJECT}\n```"),
    ],
)
def test_mistakes_in_a_family_s_own_form(name: str, text: str) -> None:
    family = next(f for f in FAMILIES if name in f.names.split())
    assert _read(family, text) == ("", "", [FERRY])


def test_calls_that_follow_each_other_without_markers() -> None:
    family = next(f for f in FAMILIES if "mistral" in f.names.split())
    text = '[TOOL_CALLS]ferry_times{"harbour": "Ærø"}tide_now{}'
    assert _read(family, text) == ("", "", [FERRY, TIDE])
    for separator in (", ", "; ", "\n"):
        text = f"ferry_times(harbour='Ærø'){separator}tide_now()"
        assert _read(family, text) == ("", "", [FERRY, TIDE])


def test_a_dictionary_for_an_argument_that_is_one_stays_its_value() -> None:
    family = next(f for f in FAMILIES if "lfm2" in f.names.split())
    tools = [tool("sail", route="object", day="string")]
    text = "<|tool_call_start|>[sail({'day': 'x'}, day='y')]<|tool_call_end|>"
    assert _read(family, text, tools=tools)[2] == [("sail", {"route": {"day": "x"}, "day": "y"})]


PIECES = [*MARKED.values(), *UNMARKED.values(), *ALONE.values(), *TEXTS.values(), "Hm.", "<think>"]


@pytest.mark.parametrize("family", READERS, ids=_ids)
@given(data=st.data())
@settings(max_examples=examples(15))
def test_no_split_of_foreign_calls_matters(family: Family, data: st.DataObject) -> None:
    """Whole and half calls in any order, which the length limit may cut."""
    halves = st.sampled_from(PIECES).flatmap(
        lambda text: st.tuples(st.just(text), st.integers(1, len(text)))
    )
    drawn = data.draw(st.lists(halves, max_size=4))
    text = data.draw(st.sampled_from(["\n", " ", ""])).join(text[:end] for text, end in drawn)
    reason = data.draw(st.sampled_from(["stop", "length"]))
    tools = data.draw(st.sampled_from([TOOLS, []]))
    message = _read(family, text, reason=reason, tools=tools)
    assert tools or not message[2]
