"""Families whose grammars are variations of another family's."""

from __future__ import annotations

from dataclasses import replace

from common.formats.cursor import Wait
from common.formats.json_calls import read_json_calls
from common.formats.qwen import MARKED_CALLS, THINK, UNMARKED_CALLS
from common.formats.qwen import TEXT as HERMES_TEXT
from common.formats.reading import CallSyntax, Reading, Tags
from common.formats.tagged_calls import CallTags, keyed, named
from common.formats.tagged_text import TaggedText


def _json_block(opener: str, closer: str) -> CallSyntax:
    def read(reading: Reading) -> Wait[None]:
        cursor = reading.cursor
        cursor.take(len(opener.removesuffix("[")))
        yield from cursor.space()
        yield from read_json_calls(reading, (closer,) if closer else ())
        yield from cursor.accept_after_space(closer)

    return CallSyntax((opener,), read, (closer,) if closer else ())


def _tagged(tags: CallTags, *think: Tags) -> TaggedText:
    return TaggedText(tags=think, calls=(CallSyntax(tags.openers, tags.read, tags.closers),))


MINIMAX_TEXT = _tagged(
    CallTags(
        call="<invoke",
        call_close="</invoke>",
        parameter="<parameter",
        parameter_close="</parameter>",
        block="<minimax:tool_call>",
        block_close="</minimax:tool_call>",
        lines="paired",
    ),
    THINK,
)
MUSE_SPARK_TEXT = _tagged(
    CallTags(
        call="<atem:invoke",
        call_close="</atem:invoke>",
        parameter="<atem:parameter",
        parameter_close="</atem:parameter>",
        block="<atem:function_calls>",
        block_close="</atem:function_calls>",
        undeclared="guess",
    ),
    Tags("<|think:start|>", "<|think:end|>", anywhere=True),
)
MINICPM_TEXT = _tagged(
    CallTags(
        call="<function",
        call_close="</function>",
        parameter="<param",
        parameter_close="</param>",
        cdata=True,
    ),
    THINK,
)
SEED_TEXT = _tagged(
    CallTags(
        call="<function=",
        call_close="</function>",
        parameter="<parameter=",
        parameter_close="</parameter>",
        header=named,
        parameter_header=keyed,
        block="<seed:tool_call>",
        block_close="</seed:tool_call>",
        lines="paired",
    ),
    Tags("<seed:think>", "</seed:think>"),
)
GRANITE_TAGS = (
    Tags("Here is my thought process:", "Here is my response:"),
    Tags("Here's my thought process:", "Here's my response:"),
)
GRANITE_TEXT = TaggedText(
    tags=(THINK, *GRANITE_TAGS),
    calls=(MARKED_CALLS, _json_block("<|tool_call|>", ""), UNMARKED_CALLS),
)
PHI4_TEXT = TaggedText(
    tags=(THINK,),
    calls=(_json_block("<|tool_call|>", "<|/tool_call|>"), _json_block("functools[", "")),
)
JAMBA_TEXT = TaggedText(tags=(THINK,), calls=(_json_block("<tool_calls>", "</tool_calls>"),))
ERNIE_TEXT = replace(HERMES_TEXT, silent=("<response>", "</response>"))
