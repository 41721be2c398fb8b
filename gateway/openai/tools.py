"""The tools of a chat request and the choice among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AliasChoices, Field

from gateway import exchange
from gateway.described import about
from gateway.openai.base import Strict
from gateway.tagged import OneOf, drop, rather

MOST_TOOLS = 1024
# OpenAI's name of a tool's schema, then Anthropic's, MCP's and Gemini's.
_SCHEMA = AliasChoices("parameters", "input_schema", "inputSchema", "parametersJsonSchema")


class FunctionDefinition(Strict):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = about("A schema of an object.", validation_alias=_SCHEMA)
    strict: bool | None = about("Enforces the schema for the arguments of calls, by a grammar.")


def _nested(flat: dict[str, Any]) -> Any:
    """Return a tool with its name at the top, as in Anthropic's API and Responses, in chat form.

    The same holds for the choice of a tool. The name may also stand beside `function`, which has
    the rest. Gemini's form of several functions in one tool becomes several tools.
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
    type: Literal["function"] = "function"
    function: FunctionDefinition

    _flat = rather(_nested, "function is missing: send name and the rest inside it")


class CustomDefinition(Strict):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    format: dict[str, Any] | None = about("Shown to the model, not enforced.")


class CustomTool(Strict):
    """A tool that accepts plain text."""

    type: Literal["custom"]
    custom: CustomDefinition

    _flat = rather(_nested, "custom is missing: send name and the rest inside it")

    @property
    def function(self) -> FunctionDefinition:
        """The function that replaces it: its text is the only argument."""
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
    name: str = Field(min_length=1)


class NamedTool(Strict):
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

    _flat = rather(_nested, "function is missing: send name inside it")


_Word = Literal["none", "auto", "required"]


def _choice_in_other_words(value: Any) -> Any:
    """Return one of Anthropic's choices in OpenAI's form; an unknown tool cannot be required."""
    kind = value.get("type") if isinstance(value, dict) else value
    if kind == "tool" and isinstance(value, dict) and "name" in value:
        return {"type": "function", "function": {"name": value["name"]}}
    return "required" if kind == "any" else kind if kind in get_args(_Word) else None


ToolChoice = Annotated[
    _Word | ToolChoiceObject,
    OneOf("a tool_choice", otherwise=_choice_in_other_words, lossless=True),
]
FunctionCallChoice = _Word | FunctionName
