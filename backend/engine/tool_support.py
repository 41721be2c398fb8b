"""Whether a chat template renders tools, found by rendering it, and what to do if it does not.

A template that drops the tools would leave the model without them and the user without an error.
Unless the model is known to use another format, it gets a description of the tools in words
(`common/tool_text`), and its answers are parsed as a Hermes model's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from common.call_grammar import writes_hermes_calls
from common.chat_format import ChatFormat

if TYPE_CHECKING:
    from backend.engine.prompts import PromptBuilder

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
_ASKS = {"role": "user", "content": "Hello"}
_SPOKEN = {"role": "system", "content": _SYSTEM}
_CALLED = (
    _ASKS,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": _NAME, "tool_call_id": "call00001", "content": _RESULT},
)


class Render(Protocol):
    """A conversation as the template renders it, or '' where it cannot."""

    def __call__(
        self,
        messages: tuple[Mapping[str, Any], ...],
        tools: tuple[Mapping[str, Any], ...] | None = None,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """Which of these the template shows: offered tools, earlier calls with their results, and what
    the system says."""

    tools: bool
    calls: bool
    system: bool


def learn(render: Render) -> ToolSupport | None:
    """Find out what the template shows; None where it renders no conversation at all."""
    if not render((_ASKS,)):
        return None
    called = render(_CALLED)
    return ToolSupport(
        tools=any(_NAME in render(each, _TOOLS) for each in ((_ASKS,), (_SPOKEN, _ASKS))),
        calls=all(text in called for text in (_NAME, _VALUE, _RESULT)),
        system=_SYSTEM in render((_SPOKEN, _ASKS)),
    )


def call_format(
    chat_format: ChatFormat, tool_parser: str, prompts: PromptBuilder
) -> ChatFormat | None:
    """The format of answers where tools are offered, if it is another than that of all answers.

    `prompts` writes tools in words from then on, where that is the way out. tool_parser: what the
    user named; a format that was named is never exchanged for another.
    """
    support = learn(prompts.sample)
    if support is None or support.tools:
        return None
    if writes_hermes_calls(chat_format.name):
        prompts.write_tools(support)
        return None
    if chat_format.name != "plain" or ChatFormat.knows_tool_parser(tool_parser):
        _log.warning(
            "the chat template shows no tools, and calls in the format %s are not described in"
            " words: the model will not know of any tools",
            chat_format.name,
        )
        return None
    prompts.write_tools(support)
    return chat_format.with_calls_of(ChatFormat.named("hermes"))
