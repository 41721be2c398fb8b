"""The fields that set the format of an answer: JSON, a schema, a grammar, a regex, a choice."""

from __future__ import annotations

from typing import Any, Literal

from gateway.described import about
from gateway.openai.base import Strict
from gateway.tagged import MOST_ENTRIES

Schema = dict[str, Any] | str


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
    """vLLM's object for the same: one of its members is set."""

    json_: Schema | None = about("A JSON schema.", alias="json")
    regex: str | None = about("A regular expression.")
    choice: list[str] | None = about("One of these texts.", max_length=MOST_ENTRIES)
    grammar: str | None = about("A grammar in GBNF or Lark.")
    json_object: bool | None = about("Any JSON object.")


class FormatFields(Strict):
    """The format of the answer; at most one of these fields may be used. An empty one is none."""

    response_format: ResponseFormat | None = about("OpenAI's; `schema` may be beside the type.")
    grammar: str | None = about("llama.cpp: a grammar in GBNF.")
    json_schema: Schema | None = about("llama.cpp: a JSON schema.")
    guided_json: Schema | None = about("vLLM: a JSON schema.")
    guided_regex: str | None = about("vLLM: a regular expression.")
    guided_choice: list[str] | None = about("vLLM: one of these texts.", max_length=MOST_ENTRIES)
    guided_grammar: str | None = about("vLLM: a grammar, GBNF or Lark.")
    structured_outputs: StructuredOutputs | None = about("vLLM: one format, in one object.")
