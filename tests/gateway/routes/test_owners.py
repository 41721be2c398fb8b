"""What one API key stores does not exist for another: two named keys, two without a name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from gateway.app import ROUTERS
from gateway.routes import lm_studio, models, ollama, page
from tests.gateway.gateway_process import GatewayProcess, tiny

Json = dict[str, Any]
ALICE, ALICE_NEXT, BOB = "first-key-of-alice", "second-key-of-alice", "the-key-of-bob"
PLAIN, OTHER = "a-key-without-name", "another-without-name"
SECRET = "violet submarine"
STRANGERS = [(ALICE, BOB), (BOB, ALICE), (ALICE, PLAIN), (PLAIN, ALICE), (PLAIN, OTHER)]


@pytest.fixture(scope="module")
def keyed() -> Iterator[GatewayProcess]:
    keys = f"alice {ALICE},alice {ALICE_NEXT},bob {BOB},{PLAIN},{OTHER}"
    process = GatewayProcess({"tiny": tiny()}, MLX_GATEWAY_API_KEYS=keys)
    yield process
    process.close()


def ask(
    keyed: GatewayProcess, key: str, method: str, path: str, body: Any = None
) -> httpx.Response:
    # All keys share the client's connections, as behind a proxy.
    headers = {"authorization": f"Bearer {key}"}
    return keyed.client.request(method, path, json=body, headers=headers)


def respond(keyed: GatewayProcess, key: str, given: Any, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "input": given, "max_output_tokens": 8, "temperature": 0, **fields}
    return ask(keyed, key, "POST", "/v1/responses", body)


def told(text: str, name: str = "msg_1") -> list[Json]:
    return [{"type": "message", "role": "user", "id": name, "content": text}]


def referred(name: str) -> list[Json]:
    return [{"type": "item_reference", "id": name}]


def items_of(keyed: GatewayProcess, key: str, name: str) -> str:
    return ask(keyed, key, "GET", f"/v1/responses/{name}/input_items").text


@pytest.mark.parametrize(("owner", "stranger"), STRANGERS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_of_another_key_is_absent(
    keyed: GatewayProcess, owner: str, stranger: str, stream: bool
) -> None:
    answer = respond(keyed, owner, told(SECRET), stream=stream)
    found = re.search(r'"id": ?"(resp_\w+)"', answer.text)
    assert found, answer.text[:300]
    name, absent = found[1], "resp_" + "0" * 32
    for method, path in (
        ("GET", "/v1/responses/{}"),
        ("GET", "/v1/responses/{}/input_items"),
        ("POST", "/v1/responses/{}/cancel"),
        ("DELETE", "/v1/responses/{}"),
    ):
        theirs, none = (ask(keyed, stranger, method, path.format(each)) for each in (name, absent))
        assert theirs.status_code == none.status_code == 404
        assert theirs.text.replace(name, absent) == none.text
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        theirs, none = (
            ask(keyed, stranger, "POST", path, {"input": "go on", "previous_response_id": each})
            for each in (name, absent)
        )
        assert theirs.status_code == none.status_code == 400
        assert theirs.text.replace(name, absent) == none.text
        assert theirs.json()["error"]["code"] == "previous_response_not_found"
    assert SECRET in items_of(keyed, owner, name)
    assert ask(keyed, owner, "DELETE", f"/v1/responses/{name}").status_code == 200


@pytest.mark.parametrize(("owner", "stranger"), STRANGERS)
def test_an_item_of_another_key_is_absent(keyed: GatewayProcess, owner: str, stranger: str) -> None:
    answer = respond(keyed, owner, told(SECRET)).json()
    made = answer["output"][0]["id"]
    for name in ("msg_1", made):
        refused = respond(keyed, stranger, referred(name))
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "item_not_found"
        # A reference in the stranger's own conversation is to the stranger's item.
        own = respond(keyed, stranger, told("green tea", name)).json()["id"]
        going_on = respond(keyed, stranger, referred(name), previous_response_id=own).json()
        listed = items_of(keyed, stranger, going_on["id"])
        assert "green tea" in listed
        assert SECRET not in listed
    assert respond(keyed, owner, referred(made)).status_code == 200
    assert respond(keyed, owner, referred("msg_1")).status_code == 400
    again = respond(keyed, owner, referred("msg_1"), previous_response_id=answer["id"])
    assert items_of(keyed, owner, again.json()["id"]).count(SECRET) == 2


def test_reasoning_of_another_key_is_absent(keyed: GatewayProcess) -> None:
    """Some clients send back only its id, and unknown ids are accepted."""
    answer = respond(keyed, ALICE, "What is 3 + 4?", max_output_tokens=64).json()
    thought = next(item for item in answer["output"] if item["type"] == "reasoning")
    text = thought["content"][0]["text"]
    bare = {"type": "reasoning", "id": thought["id"], "summary": []}
    listed = {}
    for key in (ALICE, BOB):
        going_on = respond(keyed, key, [*told("Hello"), bare, *told("Go on", "msg_2")]).json()
        listed[key] = items_of(keyed, key, going_on["id"])
        assert thought["id"] in listed[key]
    assert text in listed[ALICE]
    assert text not in listed[BOB]


def test_a_key_that_replaces_another_of_its_name_reads_what_it_stored(
    keyed: GatewayProcess,
) -> None:
    answer = respond(keyed, ALICE, told(SECRET)).json()
    later = respond(keyed, ALICE_NEXT, "Go on.", previous_response_id=answer["id"])
    assert SECRET in items_of(keyed, ALICE, later.json()["id"])


def test_without_keys_all_clients_are_one_owner(gateway: GatewayProcess) -> None:
    body = {"model": "tiny", "input": "Hello", "max_output_tokens": 2}
    name = gateway.client.post("/v1/responses", json=body, headers={"x-api-key": "one"}).json()[
        "id"
    ]
    for headers in ({"x-api-key": "two"}, {"authorization": "Bearer three"}, {}):
        assert gateway.client.get(f"/v1/responses/{name}", headers=headers).status_code == 200


def test_no_list_shows_what_another_key_sent(keyed: GatewayProcess) -> None:
    """Every path that is read without a parameter: models, slots, metrics, status, files."""
    name = respond(keyed, ALICE, told(SECRET), user=SECRET, metadata={"a": SECRET}).json()["id"]
    asked = {"model": f"{SECRET} model", "messages": told(SECRET), "user": SECRET}
    ask(keyed, ALICE, "POST", "/v1/chat/completions", asked)
    ask(keyed, ALICE, "GET", f"/v1/{SECRET}")
    routers = [*ROUTERS, models.page_router]
    routers += [each.router for each in (ollama, lm_studio, page, models)]
    paths = {
        route.path
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()) and "{" not in route.path
    }
    assert {"/models", "/metrics", "/slots", "/api/ps", "/api/tags", "/api/status"} <= paths
    for path in (*paths, "/v1/responses", "/v1/files", "/v1/batches", "/v1/conversations"):
        shown = ask(keyed, BOB, "GET", path).text
        for word in (SECRET, SECRET.replace(" ", "%20"), name, "alice"):
            assert word not in shown, path


def test_the_log_has_names_of_keys_and_nothing_that_was_sent(keyed: GatewayProcess) -> None:
    respond(keyed, ALICE, told(SECRET), user=SECRET)
    log = "\n".join(keyed.log)
    assert "key=alice" in log
    for word in (SECRET, ALICE, ALICE_NEXT, BOB, PLAIN, OTHER):
        assert word not in log.replace(f"/v1/{SECRET}", "").replace(f"{SECRET} model", "")
