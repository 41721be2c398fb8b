"""Families whose grammars are variations of another family's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from common.formats.answer import Call
from common.formats.cursor import Unreadable, Wait
from common.formats.json_calls import arguments_of, read_bare_calls, read_json_calls
from common.formats.qwen import MARKED_CALLS, THINK, UNMARKED_CALLS
from common.formats.qwen import TEXT as HERMES_TEXT
from common.formats.reading import CallSyntax, Reading, Tags, always, begins_line, no_content_yet
from common.formats.tagged_calls import CallTags, keyed, named
from common.formats.tagged_text import TaggedText
from common.formats.values import MODEL_JSON, Send, parts, read_value, string_of


def _json_block(
    opener: str, closer: str = "", begins: Callable[[Reading, str], bool] = always
) -> CallSyntax:
    def read(reading: Reading) -> Wait[None]:
        cursor = reading.cursor
        cursor.take(len(opener.removesuffix("[")))
        yield from cursor.space()
        reading.begun = bool((yield from cursor.at(["```"])))
        yield from read_json_calls(reading, (closer,) if closer else ())
        yield from cursor.accept_after_space(closer)

    return CallSyntax((opener,), read, (closer,) if closer else (), begins)


def _json_blocks(*syntaxes: CallSyntax, **others: Any) -> TaggedText:
    return TaggedText(**{"tags": (THINK,), "calls": syntaxes, **others})


def _tagged(tags: CallTags, *think: Tags) -> TaggedText:
    return TaggedText(tags=think, calls=(CallSyntax(tags.openers, tags.read, tags.closers),))


_INVOKE = CallTags(
    call="<invoke",
    call_close="</invoke>",
    parameter="<parameter",
    parameter_close="</parameter>",
    block="<minimax:tool_call>",
    block_close="</minimax:tool_call>",
    lines="paired",
)
MINIMAX_TEXT = TaggedText(
    tags=(replace(THINK, anywhere=True),),
    calls=(
        CallSyntax(_INVOKE.openers, _INVOKE.read, _INVOKE.closers),
        CallSyntax((f"{_INVOKE.call[1:]} name=",), _INVOKE.read, begins=begins_line),
        _json_block("<tool_calls>", "</tool_calls>"),  # MiniMax M1
    ),
)
_ATEM = CallTags(
    call="<atem:invoke",
    call_close="</atem:invoke>",
    parameter="<atem:parameter",
    parameter_close="</atem:parameter>",
    block="<atem:function_calls>",
    block_close="</atem:function_calls>",
    undeclared="guess",
)
MUSE_SPARK_TEXT = _tagged(_ATEM, Tags("<|think:start|>", "<|think:end|>", anywhere=True))


def _read_addressed(reading: Reading) -> Wait[None]:
    """Read a message to a tool, ` to=NAME<|message|>`, with the calls as its text."""
    cursor = reading.cursor
    cursor.take(len(_TO))
    name = yield from cursor.run(_RECIPIENT)
    reading.begun = any(offered.startswith(name) for offered in reading.tools.names)
    yield from cursor.expect("<|message|>")
    yield from cursor.space()
    yield from _ATEM.read(reading)


def _read_unaddressed(reading: Reading) -> Wait[None]:
    reading.begun = True
    yield from _ATEM.read(reading)


_TO, _RECIPIENT = " to=", re.compile(r"[^\s<]*")
_TO_USER, _NEXT = " to=user<|message|>", "<|start|>assistant"
MUSE_GLIMMER_TEXT = TaggedText(
    tags=(Tags(" to=self<|message|>", f"<|eom|>{_NEXT}", anywhere=True),),
    calls=(
        CallSyntax((_TO,), _read_addressed, _ATEM.closers, no_content_yet),
        CallSyntax((_ATEM.block,), _read_unaddressed, _ATEM.closers, no_content_yet),
    ),
    answers=(_TO_USER, f"{_NEXT}{_TO_USER}"),
    silent=("<|eom|>", _NEXT, "<|message|>", "<|eot|>"),
)
MINICPM_TEXT = _tagged(
    CallTags(
        call="<function",
        call_close="</function>",
        parameter="<param",
        parameter_close="</param>",
        cdata=True,
        lines="paired",
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
    calls=(
        MARKED_CALLS,
        _json_block("<|tool_call|>"),
        _json_block("<function_call>"),
        UNMARKED_CALLS,
    ),
)
PHI4_TEXT = _json_blocks(_json_block("<|tool_call|>", "<|/tool_call|>"), _json_block("functools["))
NEMOTRON_TEXT = _json_blocks(_json_block("<TOOLCALL>", "</TOOLCALL>"))
INTERNLM_TEXT = _json_blocks(
    _json_block("<|action_start|><|plugin|>", "<|action_end|>"),
    _json_block("<|action_start|> <|plugin|>", "<|action_end|>"),
)
_FUNCTION_CALL = "function call<|role_sep|>"
GIGACHAT3_TEXT = _json_blocks(
    _json_block("<|function_call|>"),
    _json_block(f"<|message_sep|>\n\n{_FUNCTION_CALL}"),
    _json_block(_FUNCTION_CALL),
    silent=("<|message_sep|>",),
)
_IM_END = "<|im_end|>"


def _read_unmarked_list(reading: Reading) -> Wait[None]:
    yield from read_bare_calls(reading, (_IM_END,))
    yield from reading.cursor.accept_after_space(_IM_END)


_NEXT_TURN = f"{_IM_END}\n<|im_start|>assistant"
HYPERCLOVA_TEXT = _json_blocks(
    _json_block(" -> tool/function_call", _IM_END),
    CallSyntax(("[",), _read_unmarked_list, (_IM_END,), no_content_yet),
    tags=(Tags("/think\n", _NEXT_TURN),),
    silent=(_NEXT_TURN,),
    starts_line=True,
)
SARASHINA_TEXT = _json_blocks(_json_block("<|tool_calls|>"))
PANGU_TEXT = _json_blocks(
    _json_block("<|tool_call_start|>", "<|tool_call_end|>"),
    _json_block("[unused11]", "[unused12]"),
    tags=(THINK, Tags("[unused16]", "[unused17]", anywhere=True)),
)
DOTS_TEXT = _tagged(
    replace(_INVOKE, block="<dots_function_call>", block_close="</dots_function_call>"), THINK
)
_CITATIONS = ("<co>", "<co: ", "</co>", "</co: ")
COHERE_TEXT = _json_blocks(
    _json_block("<|START_ACTION|>", "<|END_ACTION|>"),
    tags=(Tags("<|START_THINKING|>", "<|END_THINKING|>", anywhere=True),),
    answers=("<|START_RESPONSE|>", "<|START_TEXT|>"),
    silent=("<|END_RESPONSE|>", "<|END_TEXT|>", "<|END_OF_TURN_TOKEN|>"),
    inline=_CITATIONS,
)
COMMAND_R_TEXT = _json_blocks(
    _json_block("Action:", begins=begins_line),
    tags=(),
    silent=("<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    inline=_CITATIONS,
)
_INVOKE_JSON, _MODEL, _END = "<|content_invoke_tool_json|>", "<|message_model|>", "<|end_message|>"


def _read_inkling(reading: Reading) -> Wait[None]:
    """Skip a message's header with the tool's name, and read the call as JSON, which repeats it."""
    cursor = reading.cursor
    yield from cursor.accept(_MODEL)
    if not (yield from cursor.more()):
        return
    yield from cursor.run(_RECIPIENT)
    yield from cursor.expect(_INVOKE_JSON)
    yield from read_json_calls(reading, (_END,))
    yield from cursor.accept_after_space(_END)


INKLING_TEXT = TaggedText(
    tags=(Tags("<|content_thinking|>", _END, anywhere=True),),
    calls=(
        CallSyntax((_MODEL, _INVOKE_JSON), _read_inkling, (_END,)),
        CallSyntax((), _read_inkling, begins=no_content_yet, by_name=True),
    ),
    silent=(
        _MODEL,
        "<|content_text|>",
        "<|content_invoke_tool_text|>",
        "<|content_tool_error|>",
        _END,
        "<|content_model_end_sampling|>",
    ),
)


class _NamedSender:
    """Sends a call while its object is read: the only key is the tool's name."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._begun = False

    def member(self, key: str, head: str) -> Send | None:
        if self._begun or head != "{":
            return None
        self._begun = True
        self._reading.begin(string_of(key) or "")
        return self._reading.send

    def inside(self, _key: str) -> None:
        return None


def _read_apertus(reading: Reading) -> Wait[None]:
    """Read a list of objects, each with a tool's name as its key and the arguments as its value."""
    cursor = reading.cursor
    cursor.take(len(_APERTUS[0]))
    yield from cursor.space()
    yield from cursor.expect("[")
    while True:
        yield from cursor.space()
        sender = _NamedSender(reading)
        called = yield from read_value(cursor, MODEL_JSON, _APERTUS[1:], receiver=sender)
        for name, given in parts(called):
            if (arguments := arguments_of(given)) is None:
                raise Unreadable
            reading.call(Call(name, arguments))
        yield from cursor.run(_SURPLUS_BRACE)
        comma = yield from cursor.accept(",")
        yield from cursor.space()
        more = comma or (yield from cursor.at(["{"]))
        if not more or (yield from cursor.at(["]"])):
            break
    yield from cursor.drop_surplus(_APERTUS[1:])
    yield from cursor.accept_after_space(_APERTUS[1])


_SURPLUS_BRACE = re.compile(r"[}\s]*")
_APERTUS = ("<|tools_prefix|>", "<|tools_suffix|>")
APERTUS_TEXT = TaggedText(
    tags=(Tags("<|inner_prefix|>", "<|inner_suffix|>", anywhere=True),),
    calls=(CallSyntax(_APERTUS[:1], _read_apertus, _APERTUS[1:]),),
)
JAMBA_TEXT = _json_blocks(_json_block("<tool_calls>", "</tool_calls>"))
ERNIE_TEXT = replace(HERMES_TEXT, silent=("<response>", "</response>"))
HUNYUAN_TEXT = replace(JAMBA_TEXT, answers=("<answer>",), silent=("</answer>",))
APRIEL_TEXT = replace(
    JAMBA_TEXT,
    tags=(
        Tags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        Tags("<thinking>", "</thinking>"),
    ),
    silent=("[END FINAL RESPONSE]",),
)
