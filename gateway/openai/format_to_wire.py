"""FormatFields → one constraint: what a backend's Grammar holds, and how it is to be read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.errors import ApiError
from gateway.openai.format_fields import FormatFields, ResponseFormat, StructuredOutputs
from wire import backend_pb2 as pb

_ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class Constraint:
    """One wish for a form. `field`: where the client wrote it."""

    field: str
    kind: str  # json_schema, gbnf, lark or regex, as `mlx.grammar_type` names them
    text: str


def constraint_of(fields: FormatFields) -> Constraint | None:
    """The one form that is asked for. Raises ApiError for two, or for one that is malformed."""
    wishes = list(_wishes(fields))
    if len(wishes) > 1:
        raise ApiError(
            400,
            f"{wishes[0].field} and {wishes[1].field} both ask for a form of the answer:"
            " send one of them",
            param=wishes[1].field,
        )
    return wishes[0] if wishes else None


def write_constraint(options: pb.PredictOptions, constraint: Constraint | None) -> None:
    """Sets Grammar."""
    if constraint is not None:
        options.Grammar = constraint.text
        options.Metadata["mlx.grammar_type"] = constraint.kind


def _wishes(fields: FormatFields) -> Iterator[Constraint]:
    if fields.response_format is not None:
        yield from _of_response_format(fields.response_format)
    if fields.grammar:
        yield Constraint("grammar", "gbnf", fields.grammar)
    for name in ("json_schema", "guided_json"):
        if (schema := getattr(fields, name)) is not None:
            yield _schema(name, schema)
    if fields.guided_regex is not None:
        yield Constraint("guided_regex", "regex", fields.guided_regex)
    if fields.guided_choice is not None:
        yield _choice("guided_choice", fields.guided_choice)
    if fields.guided_grammar is not None:
        yield _grammar("guided_grammar", fields.guided_grammar)
    if fields.structured_outputs is not None:
        yield from _of_structured_outputs(fields.structured_outputs)


def _of_response_format(wanted: ResponseFormat) -> Iterator[Constraint]:
    if wanted.type == "json_schema":
        yield _of_json_schema(wanted)
    elif wanted.json_schema is not None:
        raise ApiError(
            400,
            f"response_format.type is {wanted.type!r}, but response_format.json_schema is given:"
            " send the type json_schema",
            param="response_format.type",
        )
    elif wanted.type == "json_object":
        field = "response_format" if wanted.schema_ is None else "response_format.schema"
        yield _schema(field, wanted.schema_ or _ANY_OBJECT)
    elif wanted.schema_ is not None:
        raise ApiError(
            400,
            "response_format.type is 'text', but response_format.schema is given: send the type"
            " json_object",
            param="response_format.type",
        )


def _of_json_schema(wanted: ResponseFormat) -> Constraint:
    """OpenAI's `json_schema`, or llama.cpp's `schema` beside the type."""
    if wanted.json_schema is None:
        if wanted.schema_ is None:
            raise _missing("response_format.json_schema")
        return _schema("response_format.schema", wanted.schema_)
    if wanted.schema_ is not None:
        raise ApiError(
            400,
            "response_format.json_schema and response_format.schema are both given: send one of"
            " them",
            param="response_format.schema",
        )
    schema = wanted.json_schema.schema_
    return _schema("response_format.json_schema.schema", schema or _ANY_OBJECT)


def _of_structured_outputs(wanted: StructuredOutputs) -> Iterator[Constraint]:
    place = "structured_outputs"
    if wanted.json_ is not None:
        yield _schema(f"{place}.json", wanted.json_)
    if wanted.regex is not None:
        yield Constraint(f"{place}.regex", "regex", wanted.regex)
    if wanted.choice is not None:
        yield _choice(f"{place}.choice", wanted.choice)
    if wanted.grammar is not None:
        yield _grammar(f"{place}.grammar", wanted.grammar)
    if wanted.json_object:
        yield Constraint(f"{place}.json_object", "json_schema", _ANY_OBJECT)


def _schema(field: str, schema: Mapping[str, Any] | str) -> Constraint:
    if not isinstance(schema, str):
        return Constraint(field, "json_schema", json.dumps(schema))
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{field} is not valid JSON: {error}", param=field) from None
    if not isinstance(value, dict):
        raise ApiError(400, f"{field} must be a JSON schema, which is an object", param=field)
    return Constraint(field, "json_schema", schema)


def _choice(field: str, texts: list[str]) -> Constraint:
    if "" in texts:
        raise ApiError(400, f"{field} has an empty text: send texts to choose from", param=field)
    return Constraint(field, "gbnf", "root ::= " + " | ".join(_literal(text) for text in texts))


def _literal(text: str) -> str:
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    return f"\\U{ord(character):08X}"


def _grammar(field: str, text: str) -> Constraint:
    """vLLM's users write either; only GBNF defines rules by `::=`."""
    return Constraint(field, "gbnf" if "::=" in text else "lark", text)


def _missing(field: str) -> ApiError:
    return ApiError(400, f"{field} is missing", param=field)
