"""DeepSeek: marked sections in V3 and V3.1, tagged parameters (DSML) from V3.2 on."""

from __future__ import annotations

from dataclasses import replace

from common.formats.answer import Call
from common.formats.cursor import Markers, Wait
from common.formats.json_calls import read_arguments
from common.formats.reading import CallSyntax, Reading, Tags
from common.formats.sections import Section
from common.formats.tagged_calls import CallTags
from common.formats.tagged_text import TaggedText

THINK = Tags("<think>", "</think>")
_SEPARATOR = "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_LINE = Markers(["\n", "{", _CALL_END])


def _read_call(reading: Reading) -> Wait[Call]:
    """`function<sep>NAME`, a line break and fenced JSON in V3; `NAME<sep>` and JSON in V3.1."""
    cursor = reading.cursor
    words: list[str] = []
    marker = yield from cursor.until(Markers([_SEPARATOR, "\n", "{"]), words.append)
    if marker not in (_SEPARATOR, "{"):
        raise cursor.unreadable()
    yield from cursor.accept(_SEPARATOR)
    after: list[str] = []
    yield from cursor.until(_LINE, after.append)
    name = "".join(after).strip() or "".join(words).strip()
    yield from cursor.space()
    if (yield from cursor.accept("```")):
        yield from cursor.accept("json")
        yield from cursor.space()
    if not name or any(letter.isspace() for letter in name):
        raise cursor.unreadable()
    reading.begin(name)
    if (yield from cursor.at([_CALL_END])):
        return Call(name, "{}")
    arguments = yield from read_arguments(reading, ("\n```", _CALL_END))
    yield from cursor.space()
    yield from cursor.accept("```")
    return Call(name, arguments)


_SECTION = Section(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    _CALL_END,
    _read_call,
)

_VARIANTS = tuple(
    replace(_SECTION, opener=f"<｜{words}｜>")
    for words in ("tool_calls_begin", "tool calls begin", r"tool\_calls\_begin", "tool▁calls")
)
"""Smaller models that were trained on DeepSeek's answers write the first marker so, and llama.cpp
reads it (deepseek_r1 in its common/chat).
"""


def _dsml(prefix: str, block: str) -> CallTags:
    return CallTags(
        call=f"<{prefix}invoke",
        call_close=f"</{prefix}invoke>",
        parameter=f"<{prefix}parameter",
        parameter_close=f"</{prefix}parameter>",
        block=f"<{prefix}{block}>",
        block_close=f"</{prefix}{block}>",
        text_flag=("string", "true"),
    )


_DSML = (
    _dsml("｜DSML｜", "function_calls"),
    _dsml("｜DSML｜", "tool_calls"),
    _dsml("｜DSML｜ ", "calls"),
)
V3_TEXT = TaggedText(
    tags=(THINK,),
    calls=(
        CallSyntax(_SECTION.openers, _SECTION.read, _SECTION.closers),
        *(CallSyntax((each.opener,), each.read, each.closers) for each in _VARIANTS),
    ),
)
DSML_TEXT = TaggedText(
    tags=(THINK,),
    calls=(
        *(CallSyntax(tags.openers, tags.read, tags.closers) for tags in _DSML),
        *V3_TEXT.calls,
    ),
)
