"""How a conversation is divided into parts whose summaries fit into the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.calls import Usage
from gateway.errors import ApiError
from gateway.responses.compaction import compact, part_ends, prompt_limit
from gateway.responses.items import ITEMS, Compaction, Item, Message

USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "hello"}
SUMMARY = {"type": "compaction", "encrypted_content": "reasoning:earlier"}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}


def result(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": "done"}


@pytest.mark.parametrize(
    ("sent", "ends"),
    [
        ([USER], [1]),
        ([USER, SAID, USER, SAID], [2, 4]),
        ([USER, call("a"), result("a"), call("b"), result("b"), SAID], [3, 5, 6]),
        ([USER, call("a"), call("b"), result("a"), result("b"), SAID], [5, 6]),
        ([USER, call("a"), USER, result("a"), SAID], [4, 5]),
        ([SUMMARY, USER, SAID, USER], [3, 4]),
    ],
)
def test_where_a_conversation_may_be_divided(sent: list[Any], ends: list[int]) -> None:
    assert list(part_ends(ITEMS.validate_python(sent))) == ends


def weight(item: Item) -> int:
    """The tokens of an item: ten for a summary; for a message, the number that is its text."""
    if isinstance(item, Compaction):
        return 10
    assert isinstance(item, Message)
    (part,) = item.content
    return int(getattr(part, "text", 0))


@given(st.lists(st.integers(1, 80), min_size=1, max_size=30))
async def test_every_item_is_summarised_once_and_in_order(sizes: list[int]) -> None:
    items = ITEMS.validate_python([USER | {"content": str(size)} for size in sizes])
    seen: list[Item] = []

    async def count(part: Sequence[Item]) -> int:
        return sum(map(weight, part))

    async def summarise(part: Sequence[Item]) -> tuple[str, Usage]:
        assert sum(map(weight, part)) <= 100
        assert isinstance(part[0], Compaction) == bool(seen)
        seen.extend(item for item in part if isinstance(item, Message))
        return "so far", Usage(prompt_tokens=1)

    compacted = await compact(items, 100, count, summarise)
    assert seen == items
    assert compacted["output"][0]["encrypted_content"] == "reasoning:so far"
    assert compacted["usage"]["input_tokens"] >= 1


async def test_an_empty_summary_is_an_error() -> None:
    async def count(_: Sequence[Item]) -> int:
        return 1

    async def summarise(_: Sequence[Item]) -> tuple[str, Usage]:
        return " \n", Usage()

    with pytest.raises(ApiError, match="empty summary"):
        await compact(ITEMS.validate_python([USER]), 100, count, summarise)


def test_a_prompt_leaves_tokens_for_a_summary() -> None:
    assert prompt_limit(None) is None
    assert prompt_limit(40_960) == 40_960 - 2048
    assert prompt_limit(1000) == 750
