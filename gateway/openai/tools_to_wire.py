"""Tools, the choice among them, and their legacy forms → the protocol's Tools and ToolChoice."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from common.field_names import named
from common.wording import shown
from gateway.errors import bad_field
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.tools import FunctionDefinition, FunctionName
from wire import backend_pb2 as pb


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request in OpenAI's form, and the choice: auto, none, required or a name."""

    tools: tuple[dict[str, Any], ...] = ()
    mode: str = "auto"
    name: str = ""

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.mode != "none"

    @property
    def must_call(self) -> bool:
        return self.mode == "required"


def offer_of(request: ChatCompletionRequest) -> Offer:
    """Return the tools offered. Raises ApiError for a choice that does not fit the tools."""
    if is_legacy(request):
        return _legacy(request)
    tools = tuple(_tool(tool.function) for tool in request.tools or ())
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return _checked(Offer(tools, choice or "auto"), "tool_choice")
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise bad_field(f"{named('tool_choice.allowed_tools')} is missing")
        names = dict.fromkeys(entry.name for entry in choice.allowed_tools.tools)
        _require_known(tools, names, "tool_choice.allowed_tools.tools")
        allowed = tuple(tool for tool in tools if tool["function"]["name"] in names)
        return Offer(allowed, choice.allowed_tools.mode)
    if not choice.name:
        raise bad_field(f"{named(f'tool_choice.{choice.type}')} is missing")
    return _checked(Offer(tools, "required", choice.name), f"tool_choice.{choice.type}.name")


def is_legacy(request: ChatCompletionRequest) -> bool:
    """Return whether the answer is to have `function_call` instead of `tool_calls`."""
    return bool(request.functions or request.function_call)


def is_single_call(request: ChatCompletionRequest) -> bool:
    """Return whether an answer ends after its first call."""
    return request.parallel_tool_calls is False or is_legacy(request)


def write_tools(options: pb.PredictOptions, offer: Offer, *, single: bool) -> None:
    if not offer.tools:
        return
    options.Tools = json.dumps(offer.tools)
    if offer.name:
        choice: Any = {"type": "function", "function": {"name": offer.name}}
        options.ToolChoice = json.dumps(choice)
    else:
        options.ToolChoice = json.dumps(offer.mode)
    if single:
        options.Metadata["mlx.parallel_tool_calls"] = "false"


def _legacy(request: ChatCompletionRequest) -> Offer:
    for new, old in (("tools", "functions"), ("tool_choice", "function_call")):
        if getattr(request, new):
            raise bad_field(
                f"{new} is sent together with functions or function_call, its legacy form is"
                f" {named(old)}: send one kind",
            )
    tools = tuple(_tool(function) for function in request.functions or ())
    choice = request.function_call
    if isinstance(choice, FunctionName):
        return _checked(Offer(tools, "required", choice.name), "function_call.name")
    return _checked(Offer(tools, choice or "auto"), "function_call")


def _tool(function: FunctionDefinition) -> dict[str, Any]:
    given = ((name, getattr(function, name)) for name in ("description", "parameters", "strict"))
    present = {name: value for name, value in given if value is not None}
    return {"type": "function", "function": {"name": function.name, **present}}


def _checked(offer: Offer, field: str) -> Offer:
    if offer.name:
        _require_known(offer.tools, [offer.name], field)
    elif offer.must_call and not offer.tools:
        raise bad_field(f"{named(field)} is 'required', but no functions are offered: send some")
    return offer


def _require_known(tools: tuple[dict[str, Any], ...], names: Iterable[str], field: str) -> None:
    known = {tool["function"]["name"] for tool in tools}
    for name in names:
        if name not in known:
            raise bad_field(f"{named(field)} names {shown(name)}, which is not among tools")
