"""Tests whether a chat template renders tools, and provides a replacement if it does not.

With a template that ignores tools, the model would never see them, and the user would get no error.
So, unless the model is known to use another format, the tools are described in the prompt as text
(`common/tool_text`), and calls are parsed in the Hermes format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from common.call_grammar import writes_hermes_calls
from common.chat_format import ChatFormat

if TYPE_CHECKING:
    from backend.engine.prompting.prompts import PromptBuilder

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


class Render(Protocol):
    """Renders a conversation with the template; returns '' if the template cannot."""

    def __call__(
        self,
        messages: tuple[Mapping[str, Any], ...],
        tools: tuple[Mapping[str, Any], ...] | None = None,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """Whether the template renders offered tools, calls with results, and system messages."""

    tools: bool
    calls: bool
    system: bool


def learn(render: Render) -> ToolSupport | None:
    """Test the template; None if it cannot render any conversation."""
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
    """The format of answers to requests with tools; None if it is the same as for all others.

    If the template does not render tools, this also makes `prompts` describe them as text.
    tool_parser: the user's option; a format that the user chose is never replaced.
    """
    support = learn(prompts.sample)
    if support is None or support.tools:
        return None
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
