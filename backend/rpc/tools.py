"""Parses the fields Tools and ToolChoice of a request.

The choice may be in OpenAI's form, Anthropic's, or that of the Responses API, as JSON, as JSON
inside a JSON string, or as a bare word.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from backend.engine.errors import InvalidRequest
from backend.rpc.checks import json_value
from common.field_names import named
from common.wording import shown

Tool = dict[str, Any]
Mode = Literal["auto", "none", "required"]

_TOOL_KEYS = ("type", "function")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_MODES: dict[str, Mode] = {
    "": "auto",
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",
}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or must not call a tool.

    name: the tool that the model must call; "" for no particular tool.
    """

    mode: Mode = "auto"
    name: str = ""


def parse_tools(text: str) -> tuple[Tool, ...]:
    """Return the tools in the form that templates expect. Raises InvalidRequest."""
    tools = json_value(list, "Tools", text, "a JSON list")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"{named(f'Tools[{index}]')} has no function with a name")
    return tuple(tools)


def sorted_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return the tools sorted by name, with their keys in OpenAI's order; schemas do not change.

    Clients that collect tools from several servers send the same tools in a changing order. With
    sorted tools, the prompts have the same beginning, and cached prefixes can be used.
    """
    return tuple(sorted(map(_with_keys_in_order, tools), key=lambda tool: tool["function"]["name"]))


def _with_keys_in_order(tool: Tool) -> Tool:
    return _keyed(tool, _TOOL_KEYS) | {"function": _keyed(tool["function"], _FUNCTION_KEYS)}


def _keyed(given: dict[str, Any], first: Sequence[str]) -> dict[str, Any]:
    keys = [*(key for key in first if key in given), *sorted(given.keys() - set(first))]
    return {key: given[key] for key in keys}


def parse_tool_choice(text: str) -> ToolChoice:
    """Return the tool choice. Raises InvalidRequest if the text is in none of the known forms."""
    value: Any = text.strip()
    for _ in range(2):  # a JSON string may contain JSON
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            break
    if value is None:
        return ToolChoice()
    if isinstance(value, str) and value.lower() in _MODES:
        return ToolChoice(_MODES[value.lower()])
    if isinstance(value, dict):
        return _of_object(value)
    raise InvalidRequest(
        f"{named('ToolChoice')} is {shown(text.strip())}: send auto, none, required or a"
        ' function\'s name in the form {"type":"function","function":{"name":"…"}}'
    )


def _of_object(choice: dict[str, Any]) -> ToolChoice:
    kind = choice.get("type", choice.get("mode"))
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    if kind in ("function", "tool"):
        if isinstance(name, str) and name:
            return ToolChoice("required", name)
        raise InvalidRequest(
            f"{named('ToolChoice')} asks for a function, but gives no name: add it"
        )
    if isinstance(kind, str) and kind.lower() in _MODES:
        return ToolChoice(_MODES[kind.lower()])
    raise InvalidRequest(
        f"{named('ToolChoice')} has the type {shown(kind)}: send auto, none, required or function"
    )


def corrected_choice(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """Return the tool choice, corrected if LocalAI has sent a mode as the name of a function.

    LocalAI does so if a tool is strict. A name that is a mode, such as `required`, and not the name
    of a tool is therefore read as the mode.
    """
    mode = _MODES.get(choice.name.lower()) if choice.name else None
    if mode is None or choice.name in {tool["function"]["name"] for tool in tools}:
        return choice
    return ToolChoice(mode)


def offered_tools(tools: Sequence[Tool], choice: ToolChoice) -> tuple[Tool, ...]:
    """Return the tools to show to the model.

    Raises InvalidRequest if `choice` names an unknown tool.
    """
    if choice.mode == "none":
        return ()
    if choice.name and choice.name not in {tool["function"]["name"] for tool in tools}:
        raise InvalidRequest(
            f"{named('ToolChoice')} names {shown(choice.name)}, which is not among"
            f" {named('Tools')}: name one of them"
        )
    if choice.mode == "required" and not tools:
        raise InvalidRequest(
            f"{named('ToolChoice')} requires a call, but {named('Tools')} is empty: offer a"
            " tool, or send auto"
        )
    return tuple(tools)
