"""The list of models in pages, as Anthropic's clients read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.gateway_process import GatewayProcess, tiny

NAMES = ["one", "two", "three", "four"]


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    process = GatewayProcess({"one": tiny(aliases=NAMES[1:])})
    yield process
    process.close()


def page(gateway: GatewayProcess, **query: Any) -> tuple[list[str], bool]:
    """The names on a page, and whether more follow."""
    answer = gateway.client.get("/v1/models", params=query)
    assert answer.status_code == 200, answer.text
    response = answer.json()
    names = [card["id"] for card in response["data"]]
    ends = (names[0], names[-1]) if names else (None, None)
    assert (response["first_id"], response["last_id"]) == ends
    assert [model["slug"] for model in response["models"]] == names
    return names, response["has_more"]


@pytest.mark.parametrize(
    ("query", "names", "more"),
    [
        ({}, NAMES, False),
        ({"limit": 4}, NAMES, False),
        ({"limit": 3}, NAMES[:3], True),
        ({"limit": 2, "after_id": "one"}, NAMES[1:3], True),
        ({"limit": 2, "after_id": "two"}, NAMES[2:], False),
        ({"after_id": "four"}, [], False),
        ({"limit": 2, "before_id": "four"}, NAMES[1:3], True),
        ({"limit": 2, "before_id": "three"}, NAMES[:2], False),
        ({"before_id": "one", "limit": 2}, [], False),
    ],
)
def test_a_page_is_the_requested_one(
    gateway: GatewayProcess, query: dict[str, Any], names: list[str], more: bool
) -> None:
    assert page(gateway, **query) == (names, more)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"after_id": "nobody"}, "after_id"),
        ({"before_id": "nobody"}, "before_id"),
        ({"after_id": "one", "before_id": "four"}, "before_id"),
    ],
)
def test_an_invalid_page_is_refused(
    gateway: GatewayProcess, query: dict[str, Any], param: str
) -> None:
    answer = gateway.client.get("/v1/models", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_codex_finds_its_description_of_a_model(gateway: GatewayProcess) -> None:
    model = gateway.client.get("/v1/models").json()["models"][0]
    assert model["context_window"] == 1024
    assert model["auto_compact_token_limit"] < model["context_window"]
    assert model["input_modalities"] == ["text"]
    assert "apply_patch" in model["base_instructions"]
