"""Answers in each family's own format, with their correct parse.

The sentences, tools and values are the project's own; the shapes follow the families' chat
templates and the mistakes that their models make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Call = tuple[str, Any]


@dataclass(frozen=True)
class Case:
    """One answer. `calls` are name and arguments; a case without tools offers none."""

    why: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tail: str | None = None
    cut: bool = False
    tools: list[dict[str, Any]] | None = None


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool whose arguments have these schemas; a string is short for a type."""
    schemas = {k: {"type": v} if isinstance(v, str) else v for k, v in properties.items()}
    parameters = {"type": "object", "properties": schemas}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("ferry_times", harbour="string", day="string"),
    tool("tide_now"),
    tool(
        "book_cabin",
        berths="integer",
        price="number",
        pets="boolean",
        guests={"type": "array", "items": {"type": "string"}},
        route="object",
        remark={"type": ["string", "null"]},
        code="string",
    ),
    tool("save_note", path="string", text="string"),
]
