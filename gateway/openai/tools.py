"""The tools of a chat request, the choice among them, and their legacy forms."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AliasChoices, Field
from pydantic_core import to_json

from common.field_names import named
from common.wording import shown
from gateway import exchange
from gateway.described import about
from gateway.errors import bad_field
from gateway.fields import Strict
from gateway.tagged import OneOf, drop, other_form
from wire import backend_pb2 as pb

if TYPE_CHECKING:
    from gateway.openai.chat_request import ChatCompletionRequest

MOST_TOOLS = 1024
# OpenAI's name of a tool's schema, then Anthropic's, MCP's and Gemini's.
_SCHEMA = AliasChoices("parameters", "input_schema", "inputSchema", "parametersJsonSchema")
_Word = Literal["none", "auto", "required"]


class FunctionDefinition(Strict):
    """A function as the model sees it."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = about("A schema of an object.", validation_alias=_SCHEMA)
    strict: bool | None = about("Enforces the schema for the arguments of calls, by a grammar.")


def _nested(flat: dict[str, Any]) -> Any:
    """Return the chat form of a tool, or of a tool choice, that has the name beside the type.

    Anthropic's API and Responses have that form; a `function` beside the name may have the rest.
    Gemini's form of several functions in one tool becomes several tools.
    """
    for name in ("functionDeclarations", "function_declarations"):
        if isinstance(flat.get(name), list):
            return tuple({"type": "function", "function": each} for each in flat[name])
    kind = "custom" if flat.get("type") == "custom" else "function"
    if "name" not in flat:
        return None
    inner = flat.get(kind, {})
    if not isinstance(inner, dict):
        return None
    outer = {name: value for name, value in flat.items() if name not in ("type", kind)}
    return {"type": kind, kind: outer | inner}


class Tool(Strict):
    """A function that the client runs."""

    type: Literal["function"] = "function"
    function: FunctionDefinition

    _flat = other_form(_nested, "function is missing: send name and the rest inside it")


class CustomDefinition(Strict):
    """A tool that accepts plain text, as the model sees it."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    format: dict[str, Any] | None = about("Shown to the model, not enforced.")


class CustomTool(Strict):
    """A tool that accepts plain text."""

    type: Literal["custom"]
    custom: CustomDefinition

    _flat = other_form(_nested, "custom is missing: send name and the rest inside it")

    @property
    def function(self) -> FunctionDefinition:
        """The function that replaces this tool: the text is its only argument."""
        texts = [self.custom.description or ""]
        form = self.custom.format or {}
        form = form.get("grammar") or form  # the form of chats, or of Responses
        if isinstance(form, dict) and isinstance(form.get("definition"), str):
            grammar = form["definition"]
            texts.append(f"Its input follows this grammar ({form.get('syntax')}):\n{grammar}")
            exchange.current().ignore("tools[].format")
        return FunctionDefinition(
            name=self.custom.name,
            description="\n\n".join(filter(None, texts)),
            strict=None,
            parameters={
                "type": "object",
                "properties": {"input": {"type": "string"}},
                "required": ["input"],
            },
        )


AnyTool = Annotated[Tool | CustomTool, OneOf("a tool", default="function", otherwise=drop)]


class FunctionName(Strict):
    """The name of a tool that is offered."""

    name: str = Field(min_length=1)


class NamedTool(Strict):
    """The tool that must be called, or one of those that may be."""

    type: Literal["function", "custom"]
    function: FunctionName | None = None
    custom: FunctionName | None = None

    @property
    def name(self) -> str:
        named = self.function or self.custom
        return named.name if named is not None else ""


class AllowedTools(Strict):
    """Which of the tools may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[Annotated[NamedTool, OneOf("an allowed tool", otherwise=drop)]] = Field(
        min_length=1, max_length=MOST_TOOLS
    )


class ToolChoiceObject(NamedTool):
    """The tool that must be called, or those that may be."""

    type: Literal["function", "custom", "allowed_tools"]  # type: ignore[assignment]
    allowed_tools: AllowedTools | None = None

    _flat = other_form(_nested, "function is missing: send name inside it")


def _choice_in_other_words(value: Any) -> Any:
    """Return Anthropic's form of a choice in OpenAI's; None for one that has no equivalent."""
    kind = value.get("type") if isinstance(value, dict) else value
    if kind == "tool" and isinstance(value, dict) and "name" in value:
        return {"type": "function", "function": {"name": value["name"]}}
    return "required" if kind == "any" else kind if kind in get_args(_Word) else None


ToolChoice = Annotated[
    _Word | ToolChoiceObject,
    OneOf("a tool_choice", otherwise=_choice_in_other_words, lossless=True),
]
FunctionCallChoice = _Word | FunctionName


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request in OpenAI's form, and the choice: auto, none, required or a name."""

    tools: tuple[dict[str, Any], ...] = ()
    mode: str = "auto"
    name: str = ""


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


def write_tools(options: pb.PredictOptions, offer: Offer, request: ChatCompletionRequest) -> None:
    if not offer.tools:
        return
    options.Tools = to_json(offer.tools).decode()
    called = {"type": "function", "function": {"name": offer.name}}
    options.ToolChoice = json.dumps(called if offer.name else offer.mode)
    if request.parallel_tool_calls is False or is_legacy(request):
        options.Metadata["mlx.parallel_tool_calls"] = "false"


def _legacy(request: ChatCompletionRequest) -> Offer:
    for new, old in (("tools", "functions"), ("tool_choice", "function_call")):
        if getattr(request, new):
            raise bad_field(
                f"{new} cannot be combined with functions and function_call: leave them out, or"
                f" send {named(old)}, its legacy form"
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
    elif offer.mode == "required" and not offer.tools:
        raise bad_field(f"{named(field)} is 'required', but no functions are offered: send some")
    return offer


def _require_known(tools: tuple[dict[str, Any], ...], names: Iterable[str], field: str) -> None:
    known = {tool["function"]["name"] for tool in tools}
    for name in names:
        if name not in known:
            raise bad_field(f"{named(field)} names {shown(name)}, which is not among tools")
