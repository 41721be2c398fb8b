"""The tools of a chat request and the choice among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from gateway.openai.base import Strict
from gateway.tagged import OneOf, drop, rather


class FunctionDefinition(Strict):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object.")
    strict: bool | None = Field(
        None, description="Enforces the schema for the arguments of calls, by a grammar."
    )


def _nested(flat: dict[str, Any]) -> dict[str, Any] | None:
    """A tool, or a choice of one, with its name at the top, as Anthropic's API has it."""
    if "function" in flat or "name" not in flat:
        return None
    function = {name: value for name, value in flat.items() if name != "type"}
    if "input_schema" in function:
        function["parameters"] = function.pop("input_schema")
    return {"type": "function", "function": function}


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: FunctionDefinition

    _flat = rather(_nested, "function is missing: send name and the rest inside it")


AnyTool = Annotated[Tool, OneOf("a tool", default="function", otherwise=drop)]


class FunctionName(Strict):
    name: str = Field(min_length=1)


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    """Which of the tools may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[Annotated[NamedTool, OneOf("an allowed tool", otherwise=drop)]] = Field(
        min_length=1
    )


class ToolChoiceObject(Strict):
    """The tool that must be called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    _flat = rather(_nested, "function is missing: send name inside it")


_Word = Literal["none", "auto", "required"]


def _choice_in_other_words(value: Any) -> Any:
    """Anthropic's choices in OpenAI's form; an unknown tool cannot be required."""
    kind = value.get("type") if isinstance(value, dict) else value
    if kind == "tool" and isinstance(value, dict) and "name" in value:
        return {"type": "function", "function": {"name": value["name"]}}
    return "required" if kind == "any" else kind if kind in get_args(_Word) else None


ToolChoice = Annotated[
    _Word | ToolChoiceObject,
    OneOf("a tool_choice", otherwise=_choice_in_other_words, lossless=True),
]
FunctionCallChoice = Literal["none", "auto"] | FunctionName
