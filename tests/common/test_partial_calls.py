"""Tool calls while they are written: how soon they are shown, and what remains if they are cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat_events import ChatEvent, ToolCallArguments, ToolCallStart, message_of
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser, parse_chat
from common.formats.tool_schema import ToolSchemas
from tests.common.chat_replay import parse_every_split, plain, stream
from tests.common.corpus import TOOLS, Case, tool
from tests.common.corpus.field import REPORTED
from tests.common.test_chat_corpus import FAMILIES
from tests.common.test_chat_round_trip import (
    deepseek_v31,
    deepseek_v32,
    gemma4,
    glm45,
    hermes,
    kimi_k2,
    kimi_k3,
    minimax_m2,
    mistral,
    openai,
    pythonic,
    qwen3_xml,
)
from tests.long import examples

TOKENS = re.compile(
    r">>>|/think\b|\]<\]minimax\[>\[|<[^<>\n]*>|\[(?:[A-Z_/]+|unused\d+)\]|\w+|\s+|.", re.DOTALL
)


UNCLEAR = re.compile(
    "no opening|no start|one mark for two|without opening|recipient first|no arguments"
    "|brace too many|in a value|in a string|inside text|looks|stray|an unknown name"
    "|arguments$|text before|functools"
)
"""What may be more than a call up to some place, or a shorter one."""
MARKED = [
    pytest.param(names, case, id=f"{names[0]}: {case.why}")
    for names, cases in FAMILIES.items()
    for case in cases
    if case.calls and not (case.cut or UNCLEAR.search(case.why) or names[0].startswith("llama"))
]


@pytest.mark.parametrize(("names", "case"), MARKED)
def test_a_cut_call_is_never_content(names: tuple[str, str | None, str], case: Case) -> None:
    """Wherever the length limit ends an answer, markup is never shown as text.

    A whole answer has the complete calls; a stream also has the beginning of an incomplete one.
    """
    format_ = ChatFormat.named(names[0], names[1])
    tools = ToolSchemas(TOOLS if case.tools is None else case.tools)
    tail = names[2] if case.tail is None else case.tail
    whole = parse_chat(case.text, format_, tools=tools, prompt_tail=tail)
    for token in TOKENS.finditer(case.text):
        text = case.text[: token.end()]
        cut = parse_chat(text, format_, tools=tools, prompt_tail=tail, reason="length")
        assert whole.content.startswith(cut.content.rstrip()), text
        assert plain(cut)[2] == plain(whole)[2][: len(cut.tool_calls)], text


FAMILY_CASES = {
    names: clear
    for names, cases in {**FAMILIES, **REPORTED}.items()
    if (clear := [c for c in cases if c.calls and not (c.cut or UNCLEAR.search(c.why))])
}


@pytest.mark.parametrize("names", FAMILY_CASES, ids=lambda names: str(names[0]))
@given(data=st.data())
@settings(max_examples=examples(40))
def test_a_sent_part_of_a_call_is_always_a_prefix_of_its_arguments(
    names: tuple[str, str | None, str], data: st.DataObject
) -> None:
    """This holds in every family and for any split.

    At the end of a complete answer, the parts add up to all arguments.
    """
    format_ = ChatFormat.named(names[0], names[1])
    case = data.draw(st.sampled_from(FAMILY_CASES[names]))
    tools = ToolSchemas(TOOLS if case.tools is None else case.tools)
    tail = names[2] if case.tail is None else case.tail
    whole = parse_chat(case.text, format_, tools=tools, prompt_tail=tail)
    places = sorted(data.draw(st.sets(st.integers(0, len(case.text)), max_size=30)))
    parser = ChatParser(format_, tools=tools, prompt_tail=tail, partial_calls=True)
    events: list[ChatEvent] = []
    for start, end in pairwise([0, *places, len(case.text)]):
        events += parser.feed(case.text[start:end])
        for sent, call in zip(message_of(events).tool_calls, whole.tool_calls, strict=False):
            assert sent.name == call.name
            assert call.arguments.startswith(sent.arguments)
    events += parser.finish("stop")
    assert plain(message_of(events)) == plain(whole)


@pytest.mark.parametrize("names", FAMILY_CASES, ids=lambda names: str(names[0]))
def test_a_cut_call_is_sent_as_the_whole_one_begins(names: tuple[str, str | None, str]) -> None:
    """Wherever the length limit ends an answer, no beginning of a marker is part of an argument,
    and no end of a string or number that may go on.
    """
    format_ = ChatFormat.named(names[0], names[1])
    for case in FAMILY_CASES[names]:
        tools = ToolSchemas(TOOLS if case.tools is None else case.tools)
        tail = names[2] if case.tail is None else case.tail
        whole = parse_chat(case.text, format_, tools=tools, prompt_tail=tail)
        for place in range(len(case.text)):
            text = case.text[:place]
            cut = stream(format_, [text], tools=tools, tail=tail, reason="length", partial=True)
            for sent, call in zip(message_of(cut).tool_calls, whole.tool_calls, strict=False):
                assert call.arguments.startswith(sent.arguments), text


def llama3_json(_reasoning: str, _content: str, calls: list[tuple[str, dict[str, str]]]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": a}) for name, a in calls)


def _alone(render: Callable[[str, dict[str, str]], str]) -> Callable[..., str]:
    return lambda _reasoning, _content, calls: "".join(render(*call) for call in calls)


WRITTEN: dict[str, Callable[..., str]] = {
    **{
        render.__name__: render
        for render in (
            *(hermes, deepseek_v31, deepseek_v32, gemma4, kimi_k2, kimi_k3, llama3_json),
            *(mistral, openai, pythonic),
        )
    },
    **{render.__name__: _alone(render) for render in (glm45, minimax_m2, qwen3_xml)},
}
WORDS = [f"w{number}" for number in range(60)]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_value_is_shown_as_it_is_written(name: str) -> None:
    """The name is sent before the first value, and a string lags at most two tokens behind."""
    text = WRITTEN[name]("", "", [("save_note", {"path": "a", "text": " ".join(WORDS)})])
    parser = ChatParser(ChatFormat.named(name), tools=TOOLS, partial_calls=True)
    written = shown = ""
    names: list[str] = []
    for token in re.findall(r"\s*\w+|\s+|.", text):
        written += token
        for event in parser.feed(token):
            names += [event.name] if isinstance(event, ToolCallStart) else []
            shown += event.text if isinstance(event, ToolCallArguments) else ""
        lag = len(re.findall(r"w\d+", written)) - len(re.findall(r"w\d+", shown))
        assert lag <= 2, shown
        assert names == ["save_note"] or "w0" not in written
    for event in parser.finish("stop"):
        shown += event.text if isinstance(event, ToolCallArguments) else ""
    assert json.loads(shown) == {"path": "a", "text": " ".join(WORDS)}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "hermes",
            r'<tool_call>{"name": "save_note", "arguments": {"path": "1 \u20ac"}}</tool_call>',
        ),
        ("mistral", r'[TOOL_CALLS]save_note[ARGS]{"path": ["\ud83d\ude00"]}'),
        ("llama3_json", r'{"name": "save_note", "parameters": {"path": "\u20ac"}}'),
        ("lfm2", r"<|tool_call_start|>[save_note(path='\u20ac \x41 \101')]<|tool_call_end|>"),
        (
            "glm45",
            (
                "<tool_call>save_note\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n"
                "<arg_key>text</arg_key>\n<arg_value>b</arg_value>\n</tool_call>"
            ),
        ),
    ],
)
def test_no_half_of_an_escape_or_of_a_tag_is_sent(name: str, text: str) -> None:
    format_ = ChatFormat.named(name)
    (whole,) = parse_chat(text, format_, tools=TOOLS).tool_calls
    for end in range(len(text)):
        cut = stream(format_, [text[:end]], tools=TOOLS, reason="length", partial=True)
        for sent in message_of(cut).tool_calls:
            assert whole.arguments.startswith(sent.arguments), text[:end]


@pytest.mark.parametrize("name", WRITTEN)
def test_names_have_dots_dashes_colons_and_slashes(name: str) -> None:
    if name in ("pythonic", "llama3_json"):
        names = ["fs.read", "fs"]  # other characters are not allowed in Python names
    else:
        names = ["fs/read-file", "fs:read", "mcp__fs.read", "fs"]
    for each in names:
        text = WRITTEN[name]("", "", [(each, {"path": "a"})])
        message = parse_chat(text, ChatFormat.named(name), tools=[tool(n) for n in names])
        assert plain(message)[2] == [(each, {"path": "a"})]


BROKEN = {
    "two values": ("hermes", '{"path": "a" "b"}}</tool_call>', '{"path": "a"'),
    "a string without an end": ("hermes", '{"path": "a}}</tool_call>', '{"path": "a}}</tool_call>'),
    "a model that stops": ("hermes", '{"path": "ab', '{"path": "ab'),
    "a value after the arguments": ("openai", '{"path": "a"} "b"<|call|>', '{"path": "a"'),
    "nothing after a key": ("mistral", '{"path": ', '{"path": '),
}


@pytest.mark.parametrize("why", BROKEN)
def test_a_broken_call_is_content_and_an_incomplete_call(why: str) -> None:
    """A stream equals the whole answer, and arguments without an end are not valid JSON."""
    name, rest, arguments = BROKEN[why]
    opener = {
        "hermes": '<tool_call>{"name": "save_note", "arguments": ',
        "mistral": "[TOOL_CALLS]save_note[ARGS]",
        "openai": "<|channel|>commentary to=functions.save_note<|message|>",
    }[name]
    text = f"{opener}{rest}"
    whole = parse_every_split(ChatFormat.named(name), text, tools=TOOLS)
    assert whole.content == text
    assert [(c.name, c.arguments) for c in whole.tool_calls] == [("save_note", arguments)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "save_note", "arguments": {"path" "b"}}</tool_call>'),
        ("hermes", "<tool_call><function=save_note><b>path</b></function></tool_call>"),
        ("openai", "<|channel|>commentary to=functions.save_note<|message|>{path}<|call|>"),
        ("gemma4", "<|tool_call>call:save_note{<tool_call|>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>save_note<｜tool▁sep｜>{path}<｜tool▁call▁end｜>"),
    ],
)
def test_a_call_that_is_broken_before_its_first_argument_is_content(name: str, text: str) -> None:
    message = parse_every_split(ChatFormat.named(name), text, tools=TOOLS)
    assert plain(message) == (text, "", [])


def test_a_call_that_the_prompt_has_begun_is_shown_at_its_end() -> None:
    text = '<tool_call>{"name": "save_note", "arguments": {"path": "abc", "text": "d"}}</tool_call>'
    parser = ChatParser(
        ChatFormat.named("hermes"),
        tools=TOOLS,
        prompt_tail=text[:60],
        begun=text[:60],
        partial_calls=True,
    )
    message = message_of([*parser.feed(text[60:]), *parser.finish("stop")])
    assert plain(message)[2] == [("save_note", {"path": "abc", "text": "d"})]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("llama3_json", '{"name": "save_note", "parameters": {"path": "a"}}'),
        ("llama3_json", '[ {"type": "function", "function": {"name": "save_note"'),
        ("llama4_pythonic", "[save_note(path='a')]"),
        ("lfm2", "[save_note(path='a')]"),
        ("hermes", '{"name": "save_note", "arguments": {"path": "a"}}'),
        ("mistral", '[{"name": "save_note", "arguments": {"path": "a"}}]'),
    ],
)
def test_a_cut_call_without_a_marker_is_not_content_either(name: str, call: str) -> None:
    """The same holds after text, in families whose calls may follow text."""
    follows = name.startswith(("llama", "lfm"))
    for before in ("", "Let me see.\n")[: 1 + follows]:
        for end in range(1, len(call)):
            text = before + call[:end]
            message = parse_chat(text, ChatFormat.named(name), tools=TOOLS, reason="length")
            assert message.content == before.rstrip("\n"), text


@pytest.mark.parametrize("text", ['{"city": "Par', "[1, 2", '{"name": "Bob', "[x for x", "A set {"])
def test_a_cut_text_that_is_not_a_call_is_content(text: str) -> None:
    for name in ("llama3_json", "llama4_pythonic", "hermes", "mistral"):
        message = parse_chat(text, ChatFormat.named(name), tools=TOOLS, reason="length")
        assert message.content == text


def _calls_with_parts(name: str, text: str) -> list[tuple[str, str]]:
    """Each parsed call with the part of its arguments that was shown by then."""
    parser = ChatParser(ChatFormat.named(name), tools=TOOLS, partial_calls=True)
    written = shown = ""
    found = []
    for character in text:
        written += character
        for event in parser.feed(character):
            shown += event.text if isinstance(event, ToolCallArguments) else ""
        found.append((written, shown))
    return found


FORMS = {
    "hermes": (
        '<tool_call>{"type": "function", "function": {"name": "save_note", "arguments":'
        ' {"text": "one two three four"}}}</tool_call>'
    ),
    "minicpm5": (
        '<function name="save_note"><param name="text"><![CDATA[one two three </param> four'
        "]]></param></function>"
    ),
    "glm45": (
        "<tool_call>save_note\n<arg_key>other</arg_key>\n<arg_value>one two three four"
        "</arg_value>\n</tool_call>"
    ),
    "longcat": (
        "<longcat_tool_call>save_note\n<longcat_arg_key>other</longcat_arg_key>\n"
        "<longcat_arg_value>2024-05-06 one two three four</longcat_arg_value>\n"
        "</longcat_tool_call>"
    ),
    "muse_spark": (
        '<atem:function_calls><atem:invoke name="save_note"><atem:parameter name="other">'
        "nullify one two three four</atem:parameter></atem:invoke></atem:function_calls>"
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_string_of_any_form_is_shown_as_it_is_written(name: str) -> None:
    """An object in an object, a CDATA section, an argument that no schema declares."""
    text = FORMS[name]
    for written, shown in _calls_with_parts(name, text):
        if "one" in written and "four" not in written:
            behind = written[written.index("one") :]
            streamed = shown[shown.index("one") :] if "one" in shown else ""
            # Text that may be a closing tag is withheld until it turns out not to be one.
            assert len(behind.partition("<")[0]) - len(streamed) <= 1, shown
    ((_, whole),) = _calls_with_parts(name, text)[-1:]
    assert "four" in json.dumps(json.loads(whole))


QUOTING = {
    **{
        name: render("", "", [("save_note", {"path": "p", "text": "see {} ok"})])
        for name, render in WRITTEN.items()
        if name in ("qwen3_xml", "deepseek_v32", "minimax_m2", "glm45")
    },
    **{name: FORMS[name].replace("two", "{} or") for name in ("longcat", "muse_spark")},
}


@pytest.mark.parametrize("name", QUOTING)
def test_a_call_cut_after_a_call_that_its_argument_quotes_is_neither_content_nor_whole(
    name: str,
) -> None:
    inner = QUOTING[name].replace("{}", "it").strip()
    text = QUOTING[name].replace("{}", inner)
    format_ = ChatFormat.named(name)
    whole = parse_chat(text, format_, tools=TOOLS)
    ((_, arguments),) = plain(whole)[2]
    assert inner in [*arguments.values()][-1]
    for end in range(text.index(inner) + len(inner), len(text)):
        cut = parse_chat(text[:end], format_, tools=TOOLS, reason="length")
        assert cut.content == "", text[:end]
        assert plain(cut)[2] in ([], plain(whole)[2]), text[:end]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", "<|tool_call_start|>[save_note(path='a')]]<|tool_call_end|>"),
        (
            "phi4_mini_json",
            '<|tool_call|>[{"name": "save_note", "arguments": {"path": "a"}}]]<|/tool_call|>',
        ),
    ],
)
def test_a_bracket_too_many_before_a_cut_marker_is_not_content(name: str, text: str) -> None:
    whole = parse_chat(text, ChatFormat.named(name), tools=TOOLS)
    assert plain(whole) == ("", "", [("save_note", {"path": "a"})])
    for end in range(text.index("]]") + 1, len(text)):
        cut = parse_chat(text[:end], ChatFormat.named(name), tools=TOOLS, reason="length")
        assert plain(cut) == plain(whole), text[:end]


def test_a_stream_drops_no_marker_after_a_broken_call_that_a_whole_answer_keeps() -> None:
    text = (
        '<|open|>tools<|sep|><|open|>call tool="ferry_times" index="1"<|open|>json type="x"<|sep|>'
        '[{"harbour": "Ærø"}]<|close|>json<|sep|><|close|>response<|sep|><|close|>tools<|sep|>'
    )
    kimi = ChatFormat.named("kimi_k3")
    events = stream(kimi, [text], tools=TOOLS, partial=True)
    whole = parse_chat(text, kimi, tools=TOOLS)
    assert message_of(events).content == whole.content != ""
