"""The tools of a call grammar, and the schemas of their arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.formats.tool_schema import referenced
from common.json_schema import bounded, without_nulls
from common.wording import shown

_COMPOSED = frozenset("$ref allOf anyOf oneOf patternProperties".split())
_SHARED = ("$defs", "definitions")
_MAX_REFERENCES = 20


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool and the JSON schema of its arguments object."""

    name: str
    schema: Mapping[str, Any]

    @classmethod
    def of(cls, tool: Mapping[str, Any]) -> CallableTool:
        """Return the tool in an OpenAI tool object. Raises ValueError.

        Additional arguments are forbidden unless the schema allows them.
        """
        function = tool.get("function")
        entry = function if isinstance(function, Mapping) else tool
        name = entry.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError("a tool has no name")
        schema = entry.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(schema, Mapping) or schema.get("type") not in (None, "object"):
            raise ValueError(
                f"the parameters of the tool {shown(name)} are not the schema of an object"
            )
        whole = {"type": "object", **bounded(without_nulls(schema))}
        if "properties" in whole and not _COMPOSED & whole.keys():
            whole.setdefault("additionalProperties", False)
        return cls(name, whole)

    def arguments(self) -> list[tuple[str, dict[str, Any], bool]]:
        """Return each argument's name, schema, and whether it is required, in declared order.

        Raises ValueError if the schema does not list its arguments.
        """
        properties = self.schema.get("properties", {})
        if _COMPOSED & self.schema.keys() or not isinstance(properties, Mapping):
            raise ValueError(
                f"the parameters of the tool {shown(self.name)} must be listed under properties to"
                " be enforced in this model's call format"
            )
        required = self.schema.get("required", ())
        missing = [key for key in required if key not in properties]
        if missing:
            raise ValueError(
                f"the tool {shown(self.name)} requires {shown(missing[0])}, which is not among its"
                " properties"
            )
        shared = shared_of(self.schema)
        return [
            (key, {**shared, **_as_object(schema)}, key in required)
            for key, schema in properties.items()
        ]


def _as_object(schema: Any) -> dict[str, Any]:
    return dict(schema) if isinstance(schema, Mapping) else {} if schema is True else {"enum": []}


def shared_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions to which references in the schema's parts lead."""
    return {key: schema[key] for key in _SHARED if key in schema}


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema with its top-level references resolved. Raises ValueError if one is bad."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        target = referenced(reference, schema)
        if not isinstance(target, Mapping):
            raise ValueError(f"the reference {shown(reference)} has no target")
        schema = {**shared_of(schema), **target}
    raise ValueError(f"the reference {shown(reference)} is circular")


def alternatives(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternative schemas for a value, with references resolved."""
    schema = resolved(schema)
    shared = shared_of(schema)
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            return [
                inner
                for option in options
                for inner in alternatives({**shared, **_as_object(option)})
            ]
    declared = schema.get("type")
    if isinstance(declared, list):
        return [{**schema, "type": name} for name in declared]
    listed = schema.get("enum")
    if declared is None and isinstance(listed, list):
        texts = [value for value in listed if isinstance(value, str)]
        others = [value for value in listed if not isinstance(value, str)]
        if texts and others:  # each family writes strings in its own way
            return [{**schema, "type": "string", "enum": texts}, {**schema, "enum": others}]
    return [schema]


def check_name(kind: str, name: str, pattern: str) -> str:
    """Return the name if the family can write it. Raises ValueError."""
    if not re.fullmatch(pattern, name):
        raise ValueError(
            f"the {kind} name {shown(name)} cannot be written in this model's call format"
        )
    return name
