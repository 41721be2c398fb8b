"""The OpenAPI document describes requests and answers correctly."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from tests.gateway.asking import WEATHER, body_of, user_message
from tests.gateway.gateway_process import GatewayProcess


def schema_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    """A named schema that can be used alone, with everything that it refers to."""
    schemas = {
        key: {**schema, "additionalProperties": schema.get("additionalProperties", False)}
        for key, schema in document["components"]["schemas"].items()
    }
    return {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 1, "n": 2, "max_tokens": 3},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"functions": [WEATHER["function"]]},
    ],
    ids=str,
)
def test_a_chat_is_as_documented(gateway: GatewayProcess, fields: dict[str, Any]) -> None:
    document = gateway.client.get("/openapi.json").json()
    documented = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert documented.keys() == {"application/json", "text/event-stream"}
    jsonschema.validate(body_of(fields), schema_of(document, "ChatCompletionRequest"))


@pytest.mark.parametrize("name", ["ChatCompletionRequest", "CompletionRequest"])
def test_unknown_fields_and_wrong_types_violate_the_document(
    gateway: GatewayProcess, name: str
) -> None:
    document = gateway.client.get("/openapi.json").json()
    good = {"model": "tiny", "messages": user_message("x")}
    if name == "CompletionRequest":
        good = {"model": "tiny", "prompt": "x"}
    jsonschema.validate(good, schema_of(document, name))
    for wrong in ({"foo": 1}, {"temperature": "0"}, {"n": 129}, {"top_p": 2}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**good, **wrong}, schema_of(document, name))
