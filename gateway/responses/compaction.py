"""`/responses/compact`: a conversation as a summary that the model itself writes.

A conversation that is longer than the context is summarised in parts: the summary of each part
begins the next. The summary is plain text in the field for encrypted content, as reasoning is.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from gateway.calls import Usage
from gateway.errors import ApiError
from gateway.openai.messages import SEAL
from gateway.responses.answer import usage_of
from gateway.responses.items import (
    Compaction,
    CustomCall,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
)
from gateway.responses.request import ReasoningConfig

REQUEST = Message.model_validate(
    {
        "role": "user",
        "content": "Summarise this conversation for an assistant that continues it and sees nothing"
        " else. State what the user asked for and every condition, what was done and decided, the"
        " paths, names, commands and figures that matter, what failed, and the next step. Leave"
        " out what is no longer needed. Write only the summary.",
    }
)
# A summary calls no tool, has no required form, and needs no reasoning.
WITHOUT = {
    "tools": None,
    "tool_choice": None,
    "text": None,
    "reasoning": ReasoningConfig(effort="none"),
}
_MOST_PARTS = 32
_MOST_TOKENS = 2048  # maximum length of a summary


def prompt_limit(context: int | None) -> int | None:
    """Return how many tokens a prompt may have beside its summary; None if that is unknown."""
    return context - min(_MOST_TOKENS, context // 4) if context else None


async def compact(
    items: Sequence[Item],
    limit: int | None,
    count: Callable[[Sequence[Item]], Awaitable[int]],
    summarise: Callable[[Sequence[Item]], Awaitable[tuple[str, Usage]]],
) -> dict[str, Any]:
    """Return the answer to a request.

    Raises ApiError for an empty summary, or a part that is too long.

    limit: the tokens that a prompt may have; None if unknown.
    count: returns the tokens of the prompt that asks for the summary of these items.
    summarise: returns the summary, and the tokens that were used.
    """
    rest = list(items)
    read = written = cached = thought = 0
    for _ in range(_MOST_PARTS):
        size = await _fitting(rest, limit, count)
        summary, used = await summarise(rest[:size])
        if not summary.strip():
            raise ApiError(502, "the model wrote an empty summary: send the request again")
        read += used.prompt_tokens
        written += used.completion_tokens
        cached += used.cached_tokens
        thought += used.reasoning_tokens
        sealed = Compaction(
            type="compaction",
            id=f"cmp_{uuid.uuid4().hex}",
            status="completed",
            encrypted_content=SEAL + summary.strip(),
        )
        if size == len(rest):
            return {
                "id": f"resp_{uuid.uuid4().hex}",
                "object": "response.compaction",
                "created_at": int(time.time()),
                "output": [sealed.model_dump()],
                "usage": usage_of(Usage(read, written, cached, thought)),
            }
        rest = [sealed, *rest[size:]]
    raise ApiError(
        400, f"input needs more than {_MOST_PARTS} summaries: compact it earlier", param="input"
    )


async def _fitting(
    items: Sequence[Item], limit: int | None, count: Callable[[Sequence[Item]], Awaitable[int]]
) -> int:
    """Return how many of the items fit into a prompt, but at least one part.

    The model refuses a part that does not fit.
    """
    if limit is None or await count(items) <= limit:
        return len(items)
    ends = list(part_ends(items))
    least, most = 0, len(ends) - 1
    while least < most:
        middle = (least + most + 1) // 2
        if await count(items[: ends[middle]]) <= limit:
            least = middle
        else:
            most = middle - 1
    return ends[least]


def part_ends(items: Sequence[Item]) -> Iterator[int]:
    """Yield where a conversation may be divided: before user messages, and between rounds of calls.

    A call stays with its result, and an earlier summary with what follows it.
    """
    open_calls: set[str] = set()
    for at, item in enumerate(items):
        begins = isinstance(item, Message) and item.role == "user"
        begins = begins or (at > 0 and isinstance(items[at - 1], FunctionCallOutput))
        alone = at == 1 and isinstance(items[0], Compaction)
        if at and begins and not (open_calls or alone or isinstance(item, FunctionCallOutput)):
            yield at
        if isinstance(item, FunctionCall | CustomCall):
            open_calls.add(item.call_id)
        elif isinstance(item, FunctionCallOutput):
            open_calls.discard(item.call_id)
    yield len(items)
