"""Objects that say by one of their own fields what they are: checked as exactly that kind.

pydantic's unions put the names of their members into the place of an error, and complain of every
member in turn. Here the kind is looked up first, so that an error's place is a path of the body
(messages[0].content[1].text), and its sentence is about the kind that was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, PlainValidator, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


def one_of(
    kinds: Mapping[str, type[BaseModel]],
    *,
    schema: Any,
    unknown: Callable[[str], str],
    tag: str = "type",
    default: str | None = None,
    words: Collection[str] = (),
) -> PlainValidator:
    """Checks an object as the kind that its `tag` names.

    `unknown` words the refusal of any other kind, `default` is the kind where none, or null, is
    named, `words` are texts that may stand instead of an object, and `schema` is the union that
    the OpenAPI document shows.
    """

    def check(value: Any) -> Any:
        if isinstance(value, str) and words:
            if value in words:
                return value
            raise _sentence(unknown(value[:64]))
        if not isinstance(value, dict):
            raise _sentence("send an object")
        named = value.get(tag)
        if named is None and default is not None:
            named = default
            value = {**value, tag: default}
        if named is None:
            missing = InitErrorDetails(type="missing", loc=(tag,), input=value)
            raise ValidationError.from_exception_data(tag, [missing])
        if not isinstance(named, str) or named not in kinds:
            details = InitErrorDetails(
                type=_sentence(unknown(str(named)[:64])), loc=(tag,), input=named
            )
            raise ValidationError.from_exception_data(tag, [details])
        return kinds[named].model_validate(value)

    return PlainValidator(check, json_schema_input_type=schema)


def text_as(block: Callable[[str], dict[str, Any]], schema: Any) -> BeforeValidator:
    """Lets a plain text stand for a list of one block."""

    def expand(value: Any) -> Any:
        return [block(value)] if isinstance(value, str) else value

    return BeforeValidator(expand, json_schema_input_type=schema)


def unserved(reason: str, *passing: object) -> BeforeValidator:
    """A field that is known, and refused with a reason unless it is null or one of `passing`."""

    def check(value: Any) -> Any:
        if value is None or any(type(value) is type(off) and value == off for off in passing):
            return value
        raise _sentence(reason)

    return BeforeValidator(check)


def _sentence(words: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{sentence}", {"sentence": words})
