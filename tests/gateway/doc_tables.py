"""Writes the tables in docs/gateway.md and docs/models.md: `python -m tests.gateway.doc_tables`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from common.field_table import FieldTable
from gateway import fields
from gateway.arguments import KEY_FILE, default_of, flag_of
from gateway.models.config import KEYS, ModelConfig
from gateway.settings import GatewaySettings


def settings_table() -> str:
    """The settings as the table of docs/gateway.md."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    rows += [
        f"| `{flag_of(row)}` | {default_of(row)} | {row.metadata['rule'].meaning} |"
        for row in dataclasses.fields(GatewaySettings)
    ]
    return "\n".join([*rows, f"| `--api-key-file` |  | {KEY_FILE} |", ""])


def tables() -> dict[str, str]:
    """Each table by the name in the comments around it in docs/models.md."""
    schema = ModelConfig.model_json_schema()
    keys = [
        f"| `{key}` | {_value(field)} | {_default(field)} | {field['description']} |"
        for key, field in _fields(schema, schema["$defs"], "")
    ]
    return {
        "keys": _table("key | value | default | meaning", keys),
        "neutral keys": _table("keys | why", _reasons(KEYS.neutral)),
        "refused keys": _table("keys | instead", _reasons(_advice(KEYS))),
    }


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([f"| {head} |", "|" + "---|" * (head.count("|") + 1), *rows, ""])


def _advice(table: FieldTable) -> dict[str, str]:
    return {name: row.instead for name, row in table.refused.items()}


def _reasons(keys: Mapping[str, str]) -> list[str]:
    return [f"| {_listed(names)} | {why} |" for names, why in _grouped(keys)]


def _grouped(reasons: Mapping[str, str]) -> Iterator[tuple[list[str], str]]:
    """Each group of adjacent names that have the same reason, with the reason."""
    for why, rows in groupby(reasons, reasons.__getitem__):
        yield list(rows), why


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def refused_table() -> str:
    """The refused fields of requests as the table of docs/gateway.md."""
    paths: dict[tuple[str, str], list[str]] = {}
    for path, table in REFUSING.items():
        for names, instead in _grouped(_advice(table)):
            paths.setdefault((_listed(names), instead), []).append(path)
    rows = [f"| {row[0]} | {', '.join(where)} | {row[1]} |" for row, where in paths.items()]
    return _table("fields | in | instead", rows)


REFUSING = {
    "`/chat/completions`": fields.CHAT,
    "`/completions`": fields.COMPLETION,
    "`/infill`, `/completion`": fields.INFILL,
    "`/fim/completions`": fields.FIM,
    "`/messages`": fields.MESSAGES,
    "`/responses`": fields.RESPONSES,
    "`/audio/transcriptions`": fields.TRANSCRIPTS,
    "`/embeddings`": fields.EMBEDDINGS,
    "`/rerank`, `/score`": fields.RERANK,
}


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
    if "$ref" in field:
        return "map"
    if "anyOf" in field:  # its type, or null
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


def write() -> None:
    """Write every table between the comments around it."""
    found = {"settings": settings_table(), "refused": refused_table()}
    for file, of in (("gateway.md", found), ("models.md", tables())):
        path = Path(__file__).parents[2] / "docs" / file
        text = path.read_text()
        for name, table in of.items():
            begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
            before, _, rest = text.partition(begin)
            text = before + begin + table + end + rest.partition(end)[2]
        path.write_text(text)


if __name__ == "__main__":
    write()
