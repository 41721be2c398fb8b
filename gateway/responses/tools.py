"""The tools of a Responses request: its own, those in namespaces, and those among its items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.described import about
from gateway.openai.base import Strict
from gateway.openai.tools import MOST_TOOLS, CustomDefinition, FunctionDefinition
from gateway.tagged import OneOf, drop, rather


def flat(nested: dict[str, Any]) -> dict[str, Any] | None:
    """Return a tool in this API's form, or the choice of one, from the form of chats."""
    function = nested.get("function")
    return {**function, "type": "function"} if isinstance(function, dict) else None


class FunctionTool(FunctionDefinition):
    """A function that the client runs."""

    type: Literal["function"]

    _nested = rather(flat, "name is missing: send the fields of function beside the type")


class CustomTool(CustomDefinition):
    """A tool that accepts plain text."""

    type: Literal["custom"]


_Own = FunctionTool | CustomTool
OwnTool = Annotated[_Own, OneOf("a tool", default="function", otherwise=drop)]


class NamespaceTool(Strict):
    """Tools under a name, as Codex offers those of an MCP server."""

    type: Literal["namespace"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = about("Shown to the model with the first tool.")
    tools: list[OwnTool] = Field(max_length=MOST_TOOLS)


Tool = Annotated[_Own | NamespaceTool, OneOf("a tool", default="function", otherwise=drop)]


@dataclass(frozen=True, slots=True)
class Offered:
    """One tool.

    place: its path in the request.
    namespace: "" if it is in none.
    about: the description of the namespace, for the first of its tools.
    """

    tool: _Own
    place: str
    namespace: str = ""
    about: str | None = None

    @property
    def name(self) -> str:
        """The tool's name for the model."""
        return full_name(self.namespace, self.tool.name)


def full_name(namespace: str, name: str) -> str:
    """Return the name of a tool in a namespace, because chat templates have no namespaces."""
    if not namespace or namespace.endswith("_"):
        return namespace + name
    return f"{namespace}__{name}"


def offered(tools: Sequence[_Own | NamespaceTool] | None, of: str = "") -> Iterator[Offered]:
    """Yield tools one by one, those in namespaces as well.

    of: the path of their list's owner.
    """
    for index, tool in enumerate(tools or ()):
        place = f"{of}tools[{index}]"
        if isinstance(tool, NamespaceTool):
            for at, inner in enumerate(tool.tools):
                about = None if at else tool.description
                yield Offered(inner, f"{place}.tools[{at}]", tool.name, about)
        else:
            yield Offered(tool, place)
