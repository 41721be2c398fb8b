"""Objects that say by one of their own fields what they are: checked as exactly that kind.

pydantic's unions put the names of their members into the place of an error, and complain of every
member in turn. Here the kind is looked up first, so that an error's place is a path of the body
(messages[0].content[1].text), and its sentence is about the kind that was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from gateway.tolerance import DROPPED, tolerable


def one_of(
    kinds: Mapping[str, type[BaseModel]],
    what: str,
    *,
    tag: str = "type",
    default: str | None = None,
    words: Collection[str] = (),
    instead: Mapping[str, str] = MappingProxyType({}),
    otherwise: Callable[[Any], Any] | None = None,
    lossless: bool = False,
) -> PlainValidator:
    """Checks an object as the kind that its `tag` names; `what` it is, as "a part".

    `default` is the kind where none, or null, is named, `words` are texts that may stand instead
    of an object, `instead` says what to send for a kind that is often tried. `otherwise` gives what
    takes the place of any other kind without `--strict`: DROPPED, or None where it must be refused.
    `lossless`: it says the same.
    """
    *most, last = (*words, *kinds)
    known = f"{', '.join(most)} or {last}" if most else last

    def unknown(kind: str) -> str:
        return f"{what} of type {kind} is not served: {instead.get(kind, f'send {known}')}"

    def refusal(sentence: str, value: Any, up: int) -> PydanticCustomError:
        instead = otherwise(value) if otherwise is not None else None
        if instead is None:
            return _sentence(sentence)
        return tolerable(sentence, instead, up=up, lossless=lossless)

    def check(value: Any) -> Any:
        if isinstance(value, str) and words:
            if value in words:
                return value
            raise refusal(unknown(value[:64]), value, 0)
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
                type=refusal(unknown(str(named)[:64]), value, 1), loc=(tag,), input=named
            )
            raise ValidationError.from_exception_data(tag, [details])
        return kinds[named].model_validate(value)

    schema = reduce(or_, dict.fromkeys(kinds.values()))
    return PlainValidator(
        check, json_schema_input_type=schema | Literal[*words] if words else schema
    )


def text_as(block: Callable[[str], dict[str, Any]], schema: Any) -> BeforeValidator:
    """Lets a plain text stand for a list of one block."""

    def expand(value: Any) -> Any:
        return [block(value)] if isinstance(value, str) else value

    return BeforeValidator(expand, json_schema_input_type=schema)


def rather(form: Callable[[dict[str, Any]], dict[str, Any] | None], sentence: str) -> Any:
    """A model's validator that takes an object in another's form for what it says.

    `form` gives the object as the model writes it, or None for one that is no such form.
    """

    def check(value: Any) -> Any:
        instead = form(value) if isinstance(value, dict) else None
        if instead is not None:
            raise tolerable(sentence, instead, lossless=True)
        return value

    return model_validator(mode="before")(check)


def text_of(value: Any) -> str:
    """What can be read in a part of a kind that is not known."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(text_of, value)))
    if not isinstance(value, dict):
        return ""
    source = value.get("source")
    if isinstance(source, dict):  # a document of Anthropic's
        held = "data" if source.get("type") == "text" else "content"
        return "\n".join(filter(None, [text_of(value.get("title")), text_of(source.get(held))]))
    return text_of(value.get("text") or value.get("content"))


def as_text(kind: str) -> Callable[[Any], Any]:
    """For `otherwise`: a part as text of this kind; without any, it goes.

    None, a refusal, for what a user attached and nobody could read: it would be missed.
    """

    def convert(value: dict[str, Any]) -> Any:
        if text := text_of(value):
            return {"type": kind, "text": text}
        return None if _ATTACHED & value.keys() else DROPPED

    return convert


_ATTACHED = frozenset(
    "source data url file file_id file_url file_data image image_url input_audio video"
    " video_url".split()
)


def _sentence(words: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{sentence}", {"sentence": words})
