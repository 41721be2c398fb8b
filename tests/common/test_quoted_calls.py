"""A quoted call is text with all its markers, in an answer and in reasoning."""

from __future__ import annotations

import pytest

from common.chat_format import ChatFormat
from common.formats import families
from tests.common.chat_replay import parse_every_split, plain
from tests.common.corpus import TOOLS
from tests.common.test_partial_calls import WRITTEN

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
    """A whole call, and its opening marker alone."""
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
