"""Objects with a `type` field, validated as exactly the kind that they name.

For a union, pydantic reports what is wrong with every member and puts the names of the members into
the path of an error. Here the kind is looked up first, so that the path of an error exists in the
body (messages[0].content[1].text) and the message is about the kind that was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from common.part_text import file_of, text_of
from gateway.images import PDF, type_of
from gateway.repairs import DROPPED, tolerable

FILES = ("file", "input_file")
MOST_ENTRIES = 10_000  # messages of a conversation, parts of a content


@dataclass(frozen=True, slots=True, eq=False)
class OneOf:
    """An annotation of a union of models, or of a single one, each with a literal `type`.

    A literal in the union lists words that may be sent instead of an object.

    what: the noun for errors, such as "a part".
    default: the kind if the type is missing or null.
    instead: for unknown kinds that clients often send, what the error recommends.
    otherwise: called with a value of any other unknown kind, unless `--strict` is set; returns what
        replaces it, DROPPED to remove it, None to refuse it.
    lossless: whether `otherwise` keeps the meaning.
    """

    what: str
    default: str | None = None
    instead: Mapping[str, str] = field(default_factory=dict)
    otherwise: Callable[[Any], Any] = lambda _: None
    lossless: bool = False

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema, as pydantic's hook for annotations; `source` is the annotated type."""
        members = () if isinstance(source, type) else get_args(source)
        kinds = {
            kind: member
            for member in members or (source,)
            if isinstance(member, type) and issubclass(member, BaseModel)
            for kind in _literals(member.model_fields["type"].annotation)
        }
        words = [word for member in members for word in _literals(member)]
        schema = handler(source)
        return core_schema.no_info_plain_validator_function(
            lambda value: self._checked(value, kinds, words),
            json_schema_input_schema=schema,
            # pydantic's PlainValidator would serialise twice, and warn about replaced parts.
            serialization=core_schema.wrap_serializer_function_ser_schema(
                lambda value, serialize: serialize(value), schema=schema
            ),
        )

    def _checked(
        self, value: Any, kinds: Mapping[str, type[BaseModel]], words: Sequence[str]
    ) -> BaseModel | str:
        """Return the word, or the model of the kind that an object names. Raises for any other.

        kinds: the models by their `type`.
        words: what may be sent instead of an object.
        """
        if isinstance(value, str) and words:
            if value in words:
                return value
            raise self._refusal(value, value, [*words, *kinds])
        if isinstance(value, str) and self.default in ("text", "input_text"):
            raise tolerable("send an object", {"type": self.default, "text": value}, lossless=True)
        if not isinstance(value, dict):
            raise _error("send an object")
        if value.get("type") is None:
            value = {**value, "type": self._implied_kind(value, kinds)}
        kind = value["type"]
        if isinstance(kind, str) and kind in kinds and _is_whole(value):
            return kinds[kind].model_validate(value)
        details = InitErrorDetails(type="missing", loc=("type",), input=value)
        if kind is not None:
            details["type"] = self._refusal(value, str(kind), [*words, *kinds], up=1)
            details["input"] = kind
        raise ValidationError.from_exception_data("type", [details])

    def _implied_kind(self, value: Mapping[str, Any], kinds: Collection[str]) -> str | None:
        """Return the kind of an object without a type; None if there is no default.

        An object whose fields are all objects has its kind as the name of a field: `function`, or
        one that is not served, such as Gemini's `googleSearch`.
        """
        names = [name for name in value if name != "type"]
        if names and all(isinstance(value[name], dict) for name in names):
            return next((name for name in names if name in kinds), names[0])
        return self.default

    def _refusal(
        self, value: Any, kind: str, served: Sequence[str], up: int = 0
    ) -> PydanticCustomError:
        """Return the error about a kind that is not served; it is tolerable if `otherwise` allows.

        up: how many levels above the path of the error the object is.
        """
        kind = kind[:64]
        *most, last = served
        known = f"{', '.join(most)} or {last}" if most else last
        advice = self.instead.get(kind, f"send {known}")
        sentence = f"{self.what} of type {kind} is not served: {advice}"
        replacement = self.otherwise(value)
        if replacement is None:
            return _error(sentence)
        lossless = self.lossless or "file_data" in replacement
        return tolerable(sentence, replacement, up=up, lossless=lossless)


def _literals(annotation: Any) -> Iterator[str]:
    """Yield the values of a literal, or of those in an optional or a union."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif not isinstance(annotation, type):
        for member in get_args(annotation):
            if member is not NoneType:
                yield from _literals(member)


def _is_whole(value: dict[str, Any]) -> bool:
    """Return whether a part has the fields of its kind; only files may have others."""
    whole = {"type", "filename", "file_data"} >= value.keys()
    return value["type"] not in FILES or (whole and type_of(value.get("file_data")) == PDF)


def drop(_: Any) -> Any:
    """Return DROPPED, which removes the object, as a value of `otherwise`."""
    return DROPPED


@dataclass(frozen=True, slots=True)
class TextAs:
    """An annotation of a list of blocks that may also be sent as a string.

    block: makes a block of the string.
    """

    block: Callable[[str], dict[str, Any]]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema, as pydantic's hook for annotations; `source` is the annotated list."""

        def expand(value: Any) -> Any:
            if not isinstance(value, Sequence):
                raise PydanticCustomError("blocks_type", "Input should be a string or a list")
            return [self.block(value)] if isinstance(value, str) else value

        blocks: Any = Annotated[source, Field(max_length=MOST_ENTRIES)]
        check = BeforeValidator(expand, json_schema_input_type=str | blocks)
        return check.__get_pydantic_core_schema__(blocks, handler)


def other_form(
    convert: Callable[[dict[str, Any]], Any], message: str, *, lossless: bool = True
) -> Any:
    """Return a validator for a model that also accepts an object in another API's form.

    convert: returns the object in the form that the model expects, or a tuple of several; None for
        an object that is not in the other form.
    message: the error with `--strict`.
    """

    def check(value: Any) -> Any:
        instead = convert(value) if isinstance(value, dict) else None
        if instead is not None:
            raise tolerable(message, instead, lossless=lossless)
        return value

    return model_validator(mode="before")(check)


def as_text(kind: str, unread: str = "", *, media: bool = False) -> Callable[[Any], Any]:
    """Return an `otherwise` that keeps the text of a part as a part of this kind.

    A part without text is dropped. A PDF becomes a PdfPart of `gateway.openai.messages`.

    unread: the text that replaces a document without readable text. If it is empty, the document is
        refused, as any other attachment: the answer would ignore it.
    media: an image, a video or audio becomes a part of its own kind.
    """

    def convert(value: dict[str, Any]) -> Any:
        name, data, _ = file_of(value)
        form = type_of(data)
        if form == PDF and value.get("type") in ("document", *FILES):
            file = "input_file" if kind == "input_text" else "file"
            return {"type": file, "filename": name, "file_data": data}
        if text := text_of(value) or (value.get("type") in _UNSHOWN and unread):
            return {"type": kind, "text": text}
        what, _, codec = form.partition("/")
        if media and what == "audio":
            sound = {"data": data, "format": "wav" if codec == "wav" else "mp3"}
            return {"type": "input_audio", "input_audio": sound}
        if media and what in ("image", "video"):
            return {"type": f"input_{what}", f"{what}_url": data}
        attached = "content" not in value and any(map(value.get, _ATTACHED))
        return None if attached else DROPPED

    return convert


_UNSHOWN = ("document", "container_upload")
_ATTACHED = frozenset(
    "source data base64 url file file_id file_url file_data image image_url input_audio audio_url"
    " video video_url".split()
)


def _error(sentence: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{sentence}", {"sentence": sentence})
