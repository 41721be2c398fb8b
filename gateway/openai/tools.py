"""The tools of a chat request and the choice among them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gateway.openai.base import Strict


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="A JSON schema of an object."
    )
    strict: bool | None = Field(
        default=None, description="Holds the arguments of calls to the schema by a grammar."
    )


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(Strict):
    """A function by its name."""

    name: str = Field(min_length=1)


class NamedTool(Strict):
    """A tool by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    """Which of the tools may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class ToolChoiceObject(Strict):
    """The tool that must be called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | ToolChoiceObject
FunctionCallChoice = Literal["none", "auto"] | FunctionName
