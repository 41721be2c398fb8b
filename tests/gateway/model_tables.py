"""The tables of docs/models.md: `python -m tests.gateway.model_tables` prints them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from gateway.models.config import ModelConfig
from gateway.models.foreign import NEUTRAL, REFUSED


def tables() -> dict[str, str]:
    """Each table by the name that stands around it in docs/models.md."""
    schema = ModelConfig.model_json_schema()
    keys = [
        f"| `{key}` | {_value(field)} | {_default(field)} | {field['description']} |"
        for key, field in _fields(schema, schema["$defs"], "")
    ]
    return {
        "keys": _table("key | value | default | meaning", keys),
        "neutral keys": _table("keys | why", _reasons(NEUTRAL)),
        "refused keys": _table("keys | instead", _reasons(REFUSED)),
    }


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([f"| {head} |", "|" + "---|" * (head.count("|") + 1), *rows, ""])


def _reasons(keys: Mapping[str, str]) -> list[str]:
    return [
        f"| {', '.join(f'`{key}`' for key, _ in group)} | {why} |"
        for why, group in groupby(keys.items(), lambda row: row[1])
    ]


def _fields(
    schema: Mapping[str, Any], sections: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, field in schema["properties"].items():
        if "$ref" in field:
            section = sections[field["$ref"].rpartition("/")[2]]
            yield from _fields(section, sections, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field | {"required": name in schema.get("required", ())}


def _default(field: Mapping[str, Any]) -> str:
    if field["required"] or field["default"] in (None, "", [], {}):
        return ""
    return f"`{json.dumps(field['default'])}`"


def _value(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:  # or nothing
        return _value(field["anyOf"][0])
    kind = field["type"]
    if kind == "array":
        return f"list of {_value(field['items'])}"
    if kind == "object":
        return "map"
    if kind == "boolean":
        return f"`{json.dumps(field['const'])}`" if "const" in field else "true or false"
    name = {"integer": "a whole number", "number": "a number", "string": "text"}[kind]
    if "minimum" in field:
        name += f" from {field['minimum']}"
    if "maximum" in field:
        name += f" to {field['maximum']}"
    return name


if __name__ == "__main__":
    print("\n".join(tables().values()), end="")
