"""Properties of any text: no split matters, nothing fails, nothing is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat_events import ChatMessage, message_of
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser
from common.formats import families
from common.formats.reading import FinishReason
from tests.common.chat_replay import is_whole, parse_every_split, plain, splits, stream
from tests.common.corpus import TOOLS
from tests.long import examples

FORMATS = sorted({id(family): name for name, family in families.BY_NAME.items()}.values())
WORDS = [
    *(
        "a",
        " ",
        "\n",
        "\n\n",
        "`",
        "```\n",
        '"',
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\\",
        "é",
        "😀",
        ";",
        "0",
    ),
    *('{"name": "tide_now", "arguments": {}}', '"name": "tide_now"', '"arguments": {"a": 1}'),
    *("tide_now", "ferry_times", "harbour", "call:tide_now{}", "tide_now()", "(harbour='x')"),
    *(" to=functions.tide_now", "assistant", "analysis", "final", "functions.tide_now:0"),
    *("<parameter=harbour>", "</parameter>", "<function=tide_now>", ' name="tide_now">', ">", "/>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '<|"|>', "<escape>", "<|message|>"),
    *("<｜DSML｜parameter", "</｜DSML｜parameter>", "<parameter", "<|open|>argument", "<|sep|>"),
    *(
        "'",
        "text:",
        ",path:",
        "\r\n",
        "```tool_code\n",
        "print(",
        "</function",
        "function=tide_now>",
    ),
    *("<｜tool▁sep｜>", "<|tool_call_argument_begin|>", "[ARGS]", "[CALL_ID]", "<｜DSML｜invoke"),
]


TAIL = "<|im_start|>assistant\n"


def pieces_of(format_: ChatFormat) -> st.SearchStrategy[str]:
    grammar = format_.grammar
    markers = [*grammar.openers, *grammar.closers]
    markers += [marker for tags in grammar.tags for marker in (tags.opening, tags.closing)]
    markers += [m for marker in markers for m in (marker[:-1], marker[1:]) if m]
    return st.lists(st.sampled_from([*markers, *markers, *WORDS]), max_size=25).map("".join)


def letters(text: str) -> list[str]:
    """The numbered words in a text."""
    return re.findall(r"zq\d+", text)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=examples(60))
def test_any_markers_in_any_order(name: str, data: st.DataObject) -> None:
    format_ = ChatFormat.named(name)
    text = data.draw(pieces_of(format_))
    tail = data.draw(st.sampled_from(["", *(tags.opening for tags in format_.grammar.tags)]))
    reason: FinishReason = data.draw(st.sampled_from(["stop", "length"]))
    tools = data.draw(st.sampled_from([TOOLS, []]))
    message = parse_every_split(format_, text, tools=tools, tail=tail, reason=reason)
    assert tools or not message.tool_calls


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=examples(60))
def test_every_word_occurs_exactly_once(name: str, data: st.DataObject) -> None:
    """Numbered words, in any markup and even in its tags, come out once: as text or in a call.

    The words of an incomplete call are a part of the text.
    """
    format_ = ChatFormat.named(name)
    soup = data.draw(pieces_of(format_))
    for opener in ("<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>"):
        soup = soup.replace(opener, "")  # text in a section before a call is dropped
    parts = re.split(r"(?<=[ \n])", soup)
    text = "".join(f"{part}zq{number} " for number, part in enumerate(parts))
    message = parse_every_split(format_, text, tools=TOOLS, count=1)
    calls = [json.dumps([c.name, c.arguments, c.id]) for c in message.tool_calls if is_whole(c)]
    found = letters(message.content) + letters(message.reasoning_content)
    for call in message.tool_calls:
        assert is_whole(call) or set(letters(call.arguments)[:-1]) <= set(found)
    found += [word for call in calls for word in dict.fromkeys(letters(call))]
    assert sorted(found) == sorted(letters(text))


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[")))
@settings(max_examples=examples(30))
def test_a_continued_text_is_not_changed(name: str, text: str) -> None:
    for pieces in splits(text, count=1):
        assert gone_on(ChatFormat.named(name), "It is", pieces) == ChatMessage(content=text)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=examples(60))
def test_a_continuation_is_parsed_as_a_part_of_the_whole(name: str, data: st.DataObject) -> None:
    """The second part of a text that is cut in two gives the events at the end of the whole."""
    format_ = ChatFormat.named(name)
    text = data.draw(pieces_of(format_))
    place = data.draw(st.integers(0, len(text)))
    tools = data.draw(st.sampled_from([TOOLS, []]))
    whole = plain(parse_every_split(format_, text, tools=tools, tail=TAIL, count=1))
    for pieces in splits(text[place:], count=1):
        rest = plain(gone_on(format_, text[:place], pieces, tools))
        assert whole[0].endswith(rest[0])
        assert whole[1].endswith(rest[1])
        assert whole[2][len(whole[2]) - len(rest[2]) :] == rest[2]
    begun = ChatParser(format_, tools=tools, prompt_tail=TAIL)
    message = message_of(begun.feed(text[:place]))
    assert len(message.tool_calls) + len(rest[2]) == len(whole[2])
    assert len(message.content) + len(rest[0]) <= len(whole[0])


def gone_on(
    format_: ChatFormat, begun: str, pieces: list[str], tools: Sequence[dict[str, Any]] = ()
) -> ChatMessage:
    parser = ChatParser(format_, tools=tools, prompt_tail=TAIL + begun, begun=begun)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return message_of([*events, *parser.finish("stop")])


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[")))
@settings(max_examples=examples(30))
def test_text_without_markers_is_the_answer(name: str, text: str) -> None:
    message = parse_every_split(ChatFormat.named(name), text, tools=TOOLS, count=1)
    assert message.content.strip() == text.strip()
    assert not text.strip() or message.content.strip("\n") == text.strip("\n")
    assert not message.reasoning_content
    assert not message.tool_calls


_SOURCES = [
    *("'a'", '"b, c"', "'it''s'", "'(['", '"""e"f"""', "b'z'", "rb'\\\\'", "f'{a}, (b'"),
    *("1", "1_0", "-x", "foo", "x.y", "not b", "1 if c else 'd'", "lambda: 1", "*a", "..."),
    *("", "# g", "`h`"),
]
_VALUES = st.recursive(
    st.sampled_from(_SOURCES),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" + ", "*", ", ", " or ", "", " ", ": "]), inner).map(
            "".join
        ),
        st.tuples(st.sampled_from(["(", "[", "{", "f(", "x["]), inner).map(
            lambda both: "".join(both) + {"(": ")", "[": "]", "{": "}"}[both[0][-1]]
        ),
        st.tuples(inner, st.sampled_from([".upper()", "[0]", "(1)", " % y", ",", "]", "}"])).map(
            "".join
        ),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("name", ["lfm2", "olmo3", "llama4_pythonic"])
@given(values=st.lists(_VALUES, min_size=1, max_size=3), bare=st.booleans())
@settings(max_examples=examples(150))
def test_no_python_value_makes_a_stream_differ(name: str, values: list[str], bare: bool) -> None:
    """A value of any syntax, which may be none of Python's, loses no call in either way."""
    format_ = ChatFormat.named(name)
    opener = closer = ""
    if not bare:
        opener, closer = format_.grammar.openers[0], format_.grammar.closers[0]
    if name == "llama4_pythonic" and not bare:
        opener = "<|python_start|>"
    calls = [f"save_note(path={value}, text='t')" for value in values]
    text = f"{opener}[tide_now(), {', '.join(calls)}, tide_now()]{closer}"
    message = parse_every_split(format_, text, tools=TOOLS, count=2)
    events = stream(format_, list(text), tools=TOOLS, partial=True)
    assert plain(message_of(events)) == plain(message)
    assert len(message.tool_calls) >= 2
