"""The items of a request as they are stored and listed: whole, each with an id."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from gateway.responses.items import Item

Json = dict[str, Any]
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def as_stored(items: Sequence[Item]) -> tuple[Json, ...]:
    """The items as JSON."""
    return tuple(_stored(_plain(item)) for item in items)


def _plain(value: Any) -> Any:
    """As `model_dump(exclude_none=True)`, which copies texts and stops streams for long ones."""
    if isinstance(value, BaseModel):
        return {name: _plain(inner) for name, inner in value if inner is not None}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _stored(item: Json) -> Json:
    fresh = f"{_PREFIXES[item['type']]}_{uuid.uuid4().hex}"
    return {"id": fresh, "status": "completed", **item}
