"""The fields that set the format of an answer, and the constraint to which they are converted.

The format is JSON, a schema, a grammar, a regex or a choice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import to_json

from common.field_names import named
from gateway.described import about
from gateway.errors import bad_field
from gateway.fields import Strict
from gateway.tagged import MOST_ENTRIES
from wire import backend_pb2 as pb

Schema = dict[str, Any] | Annotated[str, Field(max_length=1 << 20)]  # as text it is parsed here
_ANY_OBJECT = '{"type":"object"}'


class NamedSchema(Strict):
    """OpenAI's `json_schema` of a response format."""

    name: str | None = about("A label; the answer is the same.", min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = about("Without one: any JSON object.", alias="schema")
    strict: bool | None = about("The schema is enforced in any case.")


class ResponseFormat(Strict):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None
    schema_: Schema | None = about("In place of json_schema, also as text.", alias="schema")


class StructuredOutputs(Strict):
    """vLLM's object for the format of the answer, of which one member is set."""

    json_: Schema | None = about("A JSON schema.", alias="json")
    regex: str | None = about("A regular expression.")
    choice: list[str] | None = about("One of these texts.", max_length=MOST_ENTRIES)
    grammar: str | None = about("A grammar in GBNF or Lark.")
    json_object: bool | None = about("Any JSON object.")


class FormatFields(Strict):
    """The format of the answer; at most one field may be set. An empty field counts as absent."""

    response_format: ResponseFormat | None = about("OpenAI's; `schema` may be beside the type.")
    grammar: str | None = about("llama.cpp: a grammar in GBNF.")
    json_schema: Schema | None = about("llama.cpp: a JSON schema.")
    guided_json: Schema | None = about("vLLM: a JSON schema.")
    guided_regex: str | None = about("vLLM: a regular expression.")
    guided_choice: list[str] | None = about("vLLM: one of these texts.", max_length=MOST_ENTRIES)
    guided_grammar: str | None = about("vLLM: a grammar, GBNF or Lark.")
    regex: str | None = about("SGLang: a regular expression.")
    ebnf: str | None = about("SGLang: a grammar in GBNF.")
    structured_outputs: StructuredOutputs | None = about("vLLM: one format, in one object.")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A requested format. `field`: the name of its field in the request."""

    field: str
    kind: str  # json_schema, gbnf, lark or regex, as `mlx.grammar_type` names them
    text: str


def constraint_of(fields: FormatFields) -> Constraint | None:
    """Return the requested format. Raises ApiError if there are two, or if it is malformed."""
    constraints = list(_constraints(fields))
    if len(constraints) > 1:
        raise bad_field(
            f"{constraints[0].field} and {named(constraints[1].field)} both set the format of the"
            " answer: send one of them"
        )
    return constraints[0] if constraints else None


def write_constraint(options: pb.PredictOptions, constraint: Constraint | None) -> None:
    if constraint is not None:
        options.Grammar = constraint.text
        options.Metadata["mlx.grammar_type"] = constraint.kind


def _constraints(fields: FormatFields) -> Iterator[Constraint]:
    if fields.response_format is not None:
        yield from _of_response_format(fields.response_format)
    structured = ("structured_outputs.", fields.structured_outputs, _STRUCTURED)
    for prefix, given, readers in (("", fields, _FIELDS), structured):
        for name, read in readers.items():
            if (value := getattr(given, name, None)) not in (None, False, "", [], {}, "{}"):
                yield read(prefix + name.rstrip("_"), value)


def _of_response_format(wanted: ResponseFormat) -> Iterator[Constraint]:
    """Yield the constraint of OpenAI's `json_schema`, or llama.cpp's `schema` beside it."""
    schema, bare, kind = wanted.json_schema, wanted.schema_, wanted.type
    field = "response_format.schema" if schema is None else "response_format.json_schema"
    if schema is not None and bare is not None:
        raise bad_field(
            f"response_format.json_schema and {named('response_format.schema')} are both given:"
            " send one of them"
        )
    if schema is None and bare is None:
        if kind == "json_schema":
            raise bad_field(f"{named('response_format.json_schema')} is missing")
        field = "response_format"
    elif kind == "text" or (kind == "json_object" and schema is not None):
        raise bad_field(
            f"{named('response_format.type')} is {kind!r}, but {field} is given: send the type"
            " json_schema"
        )
    if kind != "text":
        place, given = (field, bare) if schema is None else (f"{field}.schema", schema.schema_)
        yield _schema(place, given or _ANY_OBJECT)


def _schema(field: str, schema: Mapping[str, Any] | str) -> Constraint:
    if not isinstance(schema, str):
        return Constraint(field, "json_schema", to_json(schema).decode())
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise bad_field(f"{named(field)} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_field(f"{named(field)} must be a JSON schema, which is an object")
    return Constraint(field, "json_schema", schema)


def _choice(field: str, texts: list[str]) -> Constraint:
    if "" in texts:
        raise bad_field(f"{named(field)} has an empty string: send strings to choose from")
    quoted = (f'"{"".join(map(_escaped, text))}"' for text in texts)
    return Constraint(field, "gbnf", "root ::= " + " | ".join(quoted))


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    return f"\\U{ord(character):08X}"


def _grammar(field: str, text: str) -> Constraint:
    """Return a GBNF or Lark grammar, as vLLM accepts either; only GBNF defines rules with `::=`."""
    return Constraint(field, "gbnf" if "::=" in text else "lark", text)


def _of(kind: str) -> _Reader:
    return lambda field, text: Constraint(field, kind, text)


_Reader = Callable[[str, Any], Constraint]
_FIELDS: Mapping[str, _Reader] = {
    "grammar": _of("gbnf"),
    "json_schema": _schema,
    "guided_json": _schema,
    "guided_regex": _of("regex"),
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "regex": _of("regex"),
    "ebnf": _of("gbnf"),
}
_STRUCTURED: Mapping[str, _Reader] = {
    "json_": _schema,
    "regex": _of("regex"),
    "choice": _choice,
    "grammar": _grammar,
    "json_object": lambda field, _: _schema(field, _ANY_OBJECT),
}
