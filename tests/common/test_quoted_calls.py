"""A quoted call is text with all its markers, in an answer and in reasoning."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat_format import ChatFormat
from common.chat_parser import parse_chat
from common.formats import families
from common.prefixes import common_prefix
from tests.common.chat_replay import parse_every_split, plain
from tests.common.corpus import TOOLS
from tests.common.test_partial_calls import FORMS, TOKENS, WRITTEN
from tests.long import examples

NAMES = [name for name in WRITTEN if name not in ("llama3_json", "pythonic")]
SENTENCES = {
    "inline code": "I would write `{}` here.",
    "a code block": "Like this:\n```\n{}\n```\nand so on.",
    "a code block at the end": "Like this:\n```xml\n{}\n```",
}
IN_REASONING = SENTENCES | {"a quotation": 'The text "{}" is one.'}


def _format(name: str) -> ChatFormat:
    return ChatFormat.named(name, name if name in families.REASONING else "qwen3")


def _quoted(name: str, sentence: str) -> list[str]:
    """The sentence twice: quoting a whole call, and quoting only a call's opening marker."""
    openers = _format(name).grammar.openers
    call = WRITTEN[name]("", "", [("save_note", {"path": "a", "text": "b c"})])
    begin = min(call.index(opener) for opener in openers if opener in call and len(opener) > 1)
    return [sentence.format(text) for text in (call[begin:], openers[0])]


@pytest.mark.parametrize("sentence", SENTENCES)
@pytest.mark.parametrize("name", NAMES)
def test_a_quoted_call_in_an_answer_is_text(name: str, sentence: str) -> None:
    before = {"openai": "<|channel|>final<|message|>", "kimi_k3": "<|open|>response<|sep|>"}
    tail = "<|start|>assistant" if name == "openai" else "<|im_start|>assistant\n"
    for text in _quoted(name, SENTENCES[sentence]):
        whole = before.get(name, "") + text
        message = parse_every_split(_format(name), whole, tools=TOOLS, tail=tail)
        assert plain(message) == (text, "", [])


SECTIONS = ("deepseek_v31", "kimi_k2")  # what comes before a call in an open section is dropped


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("openai", "kimi_k3", *SECTIONS)]
)
def test_a_mentioned_marker_does_not_end_the_code_block_after_it(name: str) -> None:
    """The mention looks like a malformed call, whose code blocks end with the call."""
    call, opener = _quoted(name, "{}")
    text = f"Write {opener} and more:\n```\n{call}\n{call}\n```\nOk."
    message = parse_every_split(_format(name), f"{text}\n{call}", tools=TOOLS)
    assert plain(message) == (text, "", [("save_note", {"path": "a", "text": "b c"})])


@pytest.mark.parametrize("sentence", IN_REASONING)
@pytest.mark.parametrize("name", NAMES)
def test_a_quoted_call_in_reasoning_is_text(name: str, sentence: str) -> None:
    format_ = _format(name)
    tags = format_.grammar.tags[0]
    after = {
        "openai": "<|start|>assistant<|channel|>final<|message|>",
        "kimi_k3": "<|open|>response<|sep|>",
    }
    tail = "<|start|>assistant" if name == "openai" else "<|im_start|>assistant\n"
    for text in _quoted(name, IN_REASONING[sentence]):
        whole = f"{tags.opening}{text}{tags.closing}{after.get(name, '')}Done."
        message = parse_every_split(format_, whole, tools=TOOLS, tail=tail)
        assert plain(message) == ("Done.", text, [])


PARAMETERS = {
    "deepseek_v32": ("<｜DSML｜parameter", "</｜DSML｜parameter>"),
    "glm45": ("<arg_key>", "</arg_value>"),
    "kimi_k3": ("<|open|>argument", "<|close|>argument<|sep|>"),
    "longcat": ("<longcat_arg_key>", "</longcat_arg_value>"),
    "minimax_m2": ("<parameter", "</parameter>"),
    "muse_spark": ("<atem:parameter", "</atem:parameter>"),
    "qwen3_xml": ("<parameter", "</parameter>"),
}
"""The tags of a parameter, in the families that have any."""


def _calls(name: str, text: str) -> tuple[str, str]:
    """A call with this text as its last value, and another one behind it."""
    if name in WRITTEN:
        noted = ("save_note", {"path": "p", "text": text})
        first = WRITTEN[name]("", "", [noted])
        asked = ("ferry_times", {"harbour": "Moss", "day": "today"})
        if name not in ("glm45", "minimax_m2", "qwen3_xml"):
            return first, WRITTEN[name]("", "", [noted, asked])
        return first, f"{first}\n{WRITTEN[name]('', '', [asked])}"
    first = FORMS[name].replace("one two", text)
    return first, first + FORMS[name].replace("save_note", "ferry_times")


def _quotations(name: str) -> tuple[list[str], list[str]]:
    """A call up to each of its tokens, without and with a parameter that is left open.

    Only the text after it distinguishes the latter from a complete call with the same closing tags.
    """
    call, _ = _calls(name, "it")
    start = min(call.index(opener) for opener in _format(name).grammar.openers if opener in call)
    call = call[start:].strip()
    clear: list[str] = []
    left_open: list[str] = []
    for token in TOKENS.finditer(call):
        text = call[: token.end()]
        if '<|"|>' in text:
            break  # Gemma cannot write the end of a string inside a string
        opened, closed = map(text.rfind, PARAMETERS.get(name, ("\0", "\0")))
        (left_open if opened > closed else clear).append(text)
    return clear, left_open


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("name", [*WRITTEN, "longcat", "muse_spark"])
@given(data=st.data())
@settings(max_examples=examples(30))
def test_a_value_may_quote_any_part_of_a_call(name: str, clear: bool, data: st.DataObject) -> None:
    """An answer cut at any point has no quoted call, and has the first call if that is complete."""
    quotations = _quotations(name)[0 if clear else -1] or ["it"]
    pieces = st.lists(st.sampled_from([*quotations, "see", "or"]), min_size=1, max_size=3)
    value = data.draw(pieces.map(" ".join))
    first, both = _calls(name, value)
    whole = plain(parse_chat(both, _format(name), tools=TOOLS))
    assert whole[0] == ""
    assert [called for called, _ in whole[2]] == ["save_note", "ferry_times"]
    assert value in next(reversed(whole[2][0][1].values()))
    begun = common_prefix(first, _calls(name, "")[0])
    place = data.draw(st.integers(begun, len(both) - 1))
    cut = plain(parse_chat(both[:place], _format(name), tools=TOOLS, reason="length"))
    assert cut[0] == ""
    assert cut[2] == whole[2][: len(cut[2])]
    assert cut[2] or not clear or place < both.rindex("ferry_times")
