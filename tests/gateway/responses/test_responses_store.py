"""Which responses are kept, and for how long."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.responses.items import ITEMS, Item, Message, Reasoning, Text
from gateway.responses.request import ResponsesRequest
from gateway.responses.store import Store, Stored, as_stored, items_of
from tests.gateway.requests_begun import begun

Json = dict[str, Any]
MISSING = "400 input[0].id item_not_found"


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
    short, long = (ITEMS.validate_python([_message("msg_1", "x" * n)]) for n in (1, 10_000))
    store.put(_answered("a", short))
    store.put(_answered("b", long * 3))
    assert kept(store, "a", "b") == [True, False]
    for name in "cdef":
        store.put(_answered(name, long))
    assert kept(store, *"cdef") == [False, False, True, True]


def _answered(name: str, given: list[Item]) -> Stored:
    return replace(as_stored(given, None), response={"id": name, "output": []})


def test_the_input_is_measured_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring many parts takes long: `as_stored` runs on a thread, and `put` does not."""
    given = _answered("a", ITEMS.validate_python([_message("msg_1", "said")]))
    monkeypatch.setattr("gateway.responses.store._size", None)
    Store().put(given)


def _resolved(store: Store, name: str, previous: Stored | None = None) -> str:
    """The text of the message that a reference stands for; the error's code if there is none."""
    body = {"input": [{"type": "item_reference", "id": name}]}
    try:
        (item,) = items_of(store.resolved(ResponsesRequest.model_validate(body).input, previous))
    except ApiError as error:
        return f"{error.status} {error.param} {error.code}"
    assert isinstance(item, Message)
    return "".join(part.text for part in item.content if isinstance(part, Text))


def _message(name: str, text: str) -> Json:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": name, "role": "user", "content": content}


def test_an_item_of_an_answer_exists_as_long_as_its_response_or_its_conversation() -> None:
    store = Store()
    first = Stored({"id": "a", "output": [_message("msg_a", "said")]}, (), ())
    store.put(first)
    second = Stored({"id": "b", "output": []}, first.conversation(), ())
    store.put(second)
    assert _resolved(store, "msg_a") == "said"
    store.delete("a")
    assert _resolved(store, "msg_a") == MISSING
    assert _resolved(store, "msg_a", second) == "said"


def test_an_id_that_a_client_chose_means_an_item_of_the_same_conversation() -> None:
    store = Store()
    one, two = (Stored({"id": text, "output": []}, (), (_message("msg_1", text),)) for text in "ab")
    store.put(one)
    store.put(two)
    assert [_resolved(store, "msg_1", each) for each in (one, two, None)] == [
        "a",
        "b",
        MISSING,
    ]


def test_what_one_owner_stores_does_not_exist_for_another() -> None:
    store = Store()
    begun().owner = "alice"
    store.put(Stored({"id": "a", "output": [_message("msg_a", "hers")]}, (), ()))
    begun().owner = "bob"
    assert kept(store, "a") == [False]
    assert _resolved(store, "msg_a") == MISSING
    with pytest.raises(ApiError, match="no stored response 'a'"):
        store.delete("a")
    begun().owner = "alice"
    assert kept(store, "a") == [True]
    assert _resolved(store, "msg_a") == "hers"
    begun()


def test_only_the_owner_who_stores_most_loses_responses() -> None:
    """Otherwise a client could delete what another stored, by storing much itself."""
    store = Store(most=4, most_bytes=100_000)
    begun().owner = "alice"
    store.put(stored("a"))
    store.put(stored("b"))
    begun().owner = "bob"
    for name in "cdef":
        store.put(stored(name))
    store.put(stored("large", text="x" * 60_000))
    assert kept(store, "c", "d", "e", "f", "large") == [False, False, False, True, True]
    store.put(stored("larger", text="x" * 70_000))
    assert kept(store, "f", "large", "larger") == [False, False, True]
    begun().owner = "alice"
    assert kept(store, "a", "b") == [True, True]
    begun()


def test_an_item_is_referred_to_once() -> None:
    """A short request with many references to a long item would become a very long one."""
    store = Store()
    store.put(Stored({"id": "a", "output": [_message("msg_a", "said")]}, (), ()))
    thought = {"type": "reasoning", "id": "rs_a", "summary": []}
    store.put(Stored({"id": "b", "output": [thought]}, (), ()))
    for sent in ({"type": "item_reference", "id": "msg_a"}, thought):
        asked = ResponsesRequest.model_validate({"input": [sent] * 2})
        with pytest.raises(ApiError, match="more than once") as caught:
            store.resolved(asked.input)
        assert (caught.value.status, caught.value.param) == (400, "input")


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
        (item,) = items_of(store.resolved(asked.input))
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


async def test_a_response_expires_without_another_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One timer waits for all responses, however many requests there are."""
    timers: list[tuple[float, Any]] = []
    loop = asyncio.get_running_loop()

    def call_later(*given: Any) -> Any:
        timers.append(given)
        return given

    monkeypatch.setattr(loop, "call_later", call_later)
    now = 0.0
    store = Store(seconds=10, clock=lambda: now)
    for name in "ab":
        store.put(stored(name))
        store.expire_later()
        now = 8.0
    ((seconds, expire),) = timers
    now = seconds
    expire()
    assert kept(store, "a", "b") == [False, True]
    assert len(timers) == 2
    now += timers[1][0] + 8
    timers[1][1]()
    assert kept(store, "b") == [False]
    assert len(timers) == 2


def test_a_disabled_store_keeps_nothing() -> None:
    store = Store(seconds=0)
    store.put(stored("a"))
    assert kept(store, "a") == [False]
