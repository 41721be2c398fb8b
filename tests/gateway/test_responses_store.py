"""Which responses are kept, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.responses.items import Reasoning
from gateway.responses.request import ResponsesRequest
from gateway.responses.store import Store, Stored

Json = dict[str, Any]


def stored(name: str, earlier: tuple[Json, ...] = (), text: str = "") -> Stored:
    message = {"type": "message", "id": f"msg_{name}", "text": text}
    return Stored({"id": name, "output": [message]}, earlier, ({"id": f"in_{name}"},))


def kept(store: Store, *names: str) -> list[bool]:
    return [_is_kept(store, name) for name in names]


def _is_kept(store: Store, name: str) -> bool:
    try:
        store.get(name, "response_id")
    except ApiError:
        return False
    return True


def test_a_conversation_continues_when_earlier_responses_are_deleted() -> None:
    store = Store()
    store.put(stored("a"))
    first = store.get("a", "previous_response_id").conversation()
    store.put(stored("b", first))
    store.delete("a")
    names = [item["id"] for item in store.get("b", "response_id").conversation()]
    assert names == ["in_a", "msg_a", "in_b", "msg_b"]


def test_the_least_recently_used_response_is_removed_for_a_new_one() -> None:
    store = Store(most=2)
    store.put(stored("a"))
    store.put(stored("b"))
    store.get("a", "response_id")
    store.put(stored("c"))
    assert kept(store, "a", "b", "c") == [True, False, True]


def test_bytes_are_limited_and_released() -> None:
    store = Store(most_bytes=30_000)
    for name in "abc":
        store.put(stored(name, text="x" * 10_000))
    assert kept(store, "a", "b", "c") == [False, True, True]
    store.delete("b")
    store.put(stored("d", text="x" * 10_000))
    assert kept(store, "c", "d") == [True, True]
    store.put(stored("huge", text="x" * 40_000))
    assert kept(store, "c", "d", "huge") == [True, True, False]


def test_items_with_the_same_id_are_all_counted() -> None:
    """Clients choose the ids of the items that they send."""
    store = Store(most_bytes=30_000)
    short, long = ({"id": "msg_1", "text": "x" * count} for count in (1, 10_000))
    store.put(Stored({"id": "a", "output": []}, (), (short,)))
    store.put(Stored({"id": "b", "output": []}, (), (long, dict(long), dict(long))))
    assert kept(store, "a", "b") == [True, False]
    for name in "cdef":
        store.put(Stored({"id": name, "output": []}, (), (dict(long),)))
    assert kept(store, *"cdef") == [False, False, True, True]


def test_an_item_exists_as_long_as_a_response_that_contains_it() -> None:
    store = Store(most=2)
    store.put(stored("a"))
    store.put(stored("b", store.get("a", "response_id").conversation()))
    store.delete("a")
    assert store.item("msg_a", "input[0].id")["id"] == "msg_a"
    assert store.item("in_b", "input[0].id")["id"] == "in_b"
    store.put(stored("c"))
    store.put(stored("d"))
    for name in ("msg_a", "in_b"):
        with pytest.raises(ApiError) as caught:
            store.item(name, "input[0].id")
        assert (caught.value.status, caught.value.param) == (400, "input[0].id")


def test_reasoning_of_which_only_the_id_came_back_is_the_stored_one() -> None:
    thought = {"type": "reasoning", "id": "rs_a", "content": [{"type": "text", "text": "hm"}]}
    store = Store()
    store.put(Stored({"id": "a", "output": [thought | {"summary": []}]}, (), ()))
    bare = {"type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
    for sent, text in (
        (bare | {"id": "rs_a"}, "hm"),
        (bare | {"id": "rs_b"}, None),
        (thought | {"content": [{"type": "text", "text": "mine"}]}, "mine"),
    ):
        asked = ResponsesRequest.model_validate({"input": [sent]})
        (item,) = store.resolved(asked.input)
        assert isinstance(item, Reasoning)
        assert (item.content[0].text if item.content else None) == text


def test_a_missing_response_is_reported_with_the_field_that_named_it() -> None:
    with pytest.raises(ApiError) as caught:
        Store().get("resp_x", "previous_response_id")
    assert (caught.value.status, caught.value.param) == (400, "previous_response_id")
    with pytest.raises(ApiError) as caught:
        Store().delete("resp_x")
    assert caught.value.status == 404


def test_responses_expire() -> None:
    now = 0.0
    store = Store(seconds=10, clock=lambda: now)
    store.put(stored("a"))
    store.put(stored("b"))
    now = 8.0
    store.get("a", "response_id")
    now = 12.0
    store.forget_old()
    assert kept(store, "a", "b") == [True, False]
    now = 30.0
    store.forget_old()
    assert kept(store, "a") == [False]


def test_a_disabled_store_keeps_nothing() -> None:
    store = Store(seconds=0)
    store.put(stored("a"))
    assert kept(store, "a") == [False]
