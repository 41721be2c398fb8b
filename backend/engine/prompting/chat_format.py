"""Chooses the chat format of a loaded model, and tests how its template renders tools and calls.

If a template ignores tools, the model never receives them, and the user gets no error. So, unless
the model is known to use another format, tools are then described as text in the prompt
(`common/tool_text`), and calls are parsed in the Hermes format.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from common.call_grammar import writes_hermes_calls
from common.chat_format import ChatFormat
from common.chat_parser import parse_chat
from common.formats.derivation import ONE, TWO, Calls, Made, derived
from common.formats.families import lenient
from common.formats.response_template import described

if TYPE_CHECKING:
    from backend.engine.prompting.prompts import PromptBuilder

_MARKER = re.compile(r"<[^<>]+>")
_log = logging.getLogger(__name__)

_NAME, _VALUE, _RESULT, _SYSTEM = "zyx_wvu", "Tsr qpo", "Nml kji", "Hgf edc"
_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string", "description": "A"}}}
_FUNCTION = {"name": _NAME, "description": "Looks.", "parameters": _PARAMETERS}
_TOOLS = ({"type": "function", "function": _FUNCTION},)
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": _NAME, "arguments": {"place": _VALUE}},
}
_QUESTION = {"role": "user", "content": "Hello"}
_INSTRUCTION = {"role": "system", "content": _SYSTEM}
_CALL_AND_RESULT = (
    _QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": _NAME, "tool_call_id": "call00001", "content": _RESULT},
)


def chat_format(
    chat_template: str | None,
    vocabulary: Collection[str],
    tool_parser: str = "",
    reasoning_parser: str = "",
    response_template: Any = None,
) -> ChatFormat:
    """Return the chat format of a model.

    If the name of a parser is unknown, the format is detected, and the name is logged. The model is
    not refused, because LocalAI's importer writes names from another table into model files.

    chat_template: the source of the model's template; None if it has none.
    vocabulary: all tokens.
    tool_parser, reasoning_parser: the options; '' if not set.
    response_template: the description of answers in tokenizer_config.json; None if there is none.
        Its tags of reasoning are used, and its calls if the model's family is unknown.
    """
    detected = ChatFormat.detect(chat_template, vocabulary)
    family = described(response_template)
    if family is not None:
        answers = ChatFormat("response_template", lenient(family), family.shape)
        if detected.name == "plain" and family.shape:
            detected = answers.with_reasoning_of(detected)
        else:
            detected = detected.with_reasoning_of(answers)
    try:
        if tool_parser and reasoning_parser:
            return ChatFormat.named(tool_parser, reasoning_parser)
        if tool_parser:
            return ChatFormat.named(tool_parser).with_reasoning_of(detected)
        if reasoning_parser:
            return detected.with_reasoning_of(ChatFormat.named(None, reasoning_parser))
    except ValueError as unknown:
        _log.warning("%s; the format is detected from the model instead", unknown)
    return detected


class Render(Protocol):
    """Renders a conversation with the template; returns '' if the template cannot."""

    def __call__(
        self,
        messages: tuple[Mapping[str, Any], ...],
        tools: tuple[Mapping[str, Any], ...] | None = None,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """Whether a template renders offered tools, calls with results, and system messages."""

    tools: bool
    calls: bool
    system: bool


def learn(render: Render) -> ToolSupport | None:
    """Test a template; return None if it cannot render any conversation."""
    if not render((_QUESTION,)):
        return None
    called = render(_CALL_AND_RESULT)
    return ToolSupport(
        tools=any(
            _NAME in render(each, _TOOLS) for each in ((_QUESTION,), (_INSTRUCTION, _QUESTION))
        ),
        calls=all(text in called for text in (_NAME, _VALUE, _RESULT)),
        system=_SYSTEM in render((_INSTRUCTION, _QUESTION)),
    )


def call_format(
    chat_format: ChatFormat, tool_parser: str, prompts: PromptBuilder
) -> ChatFormat | None:
    """Return the format of answers to requests with tools; None if no other format is needed.

    If the template does not render tools, this also makes `prompts` describe them as text. If it
    writes calls that the format does not read, their format is derived.

    tool_parser: the user's option; a format that the user chose is never replaced.
    """
    support = learn(prompts.sample)
    if support is None:
        return None
    if support.tools:
        return _format_of_calls(chat_format, tool_parser, prompts)
    if writes_hermes_calls(chat_format.name):
        prompts.write_tools(support)
        return None
    if chat_format.name != "plain" or ChatFormat.knows_tool_parser(tool_parser):
        _log.warning(
            "the chat template does not render tools, and there is no description as text for the"
            " format %s: the model will not see any tools",
            chat_format.name,
        )
        return None
    prompts.write_tools(support)
    return chat_format.with_calls_of(ChatFormat.named("hermes"))


def _format_of_calls(
    chat_format: ChatFormat, tool_parser: str, prompts: PromptBuilder
) -> ChatFormat | None:
    """Return the format in which the template writes calls; None if it is `chat_format`.

    The format may be another known format, or derived from what the template renders. Calls that no
    format reads are logged.
    """

    def render(made: Sequence[Made] | str) -> str:
        answer = {"role": "assistant", "content": made if isinstance(made, str) else ""}
        if not made:
            return prompts.sample((_QUESTION,), _TOOLS)
        if isinstance(made, str):
            return prompts.sample((_QUESTION, answer), _TOOLS)
        calls = [
            {**_CALL, "function": {"name": name, "arguments": dict(arguments)}}
            for name, arguments in made
        ]
        return prompts.sample((_QUESTION, {**answer, "tool_calls": calls}), _TOOLS)

    calls = Calls(render, chat_format.grammar.tags)
    text = calls.text(ONE)
    chosen = ChatFormat.knows_tool_parser(tool_parser)
    if not text:
        if chat_format.name == "plain" and not chosen:
            _log.warning(
                "the chat template renders tools but no calls, so their format is not known: calls"
                " will be shown as text; set tool_parser to the model's format (docs/formats.md"
                " lists them)"
            )
        return None
    # The calls of other families are read too, but a grammar enforces the format's own.
    reads = _reads(chat_format if chosen else chat_format.strict, calls, ONE)
    if not chosen:
        shown = ChatFormat.detect(text, ())
        if reads and not shown.varies(chat_format):
            return None
        if shown.name != "plain" and _reads(shown.strict, calls, ONE):
            return chat_format.with_calls_of(shown)
        family = None if reads else derived(calls)
        if family is not None:
            other = ChatFormat("derived", lenient(family), family.shape)
            found = chat_format.with_calls_of(other)
            several = not calls.text(TWO) or _reads(found.strict, calls, TWO)
            if several and _reads(found.strict, calls, ONE):
                _log.info(
                    "calls are read in a format that was derived from the chat template: %r", text
                )
                return found
    if reads:
        return None
    _log.warning(
        "the chat template writes a call as %r, which the format %s does not read: calls will be"
        " shown as text; set tool_parser to the model's format (docs/formats.md lists them)",
        text,
        chat_format.name,
    )
    return None


def _reads(chat_format: ChatFormat, calls: Calls, made: Sequence[Made]) -> bool:
    """Return whether the format reads calls as the template writes them."""
    tools = [{"name": name, "parameters": _PARAMETERS} for name, _ in TWO]
    before, text = calls.parts(made)
    message = parse_chat(text, chat_format, tools=tools, prompt_tail=before)
    found = [(call.name, call.arguments) for call in message.tool_calls]
    wanted = [(name, dict(arguments)) for name, arguments in made]
    end_of_turn = _MARKER.fullmatch(message.content.strip())
    return (not message.content.strip() or end_of_turn is not None) and wanted == [
        (name, json.loads(arguments)) for name, arguments in found
    ]
