"""The fields of requests: strict schemas, and what is tolerated beyond them.

Schemas refuse a field or a kind of object that they do not know. A field beyond a schema that would
change the answer is refused by name, unless it has the value that means "off", which clients often
send; labels have no effect. Everything else that has no meaning for a local model is left out, or
replaced by its equivalent, and the body is checked again; with `--strict` it is refused. The client
finds the names of removed fields in the header `x-ignored-fields`, the operator in the request's
log line. Wrong types, missing fields, and what the answer must look like are never repaired.
docs/gateway.md lists the refused fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from common.field_names import named
from common.field_table import FieldTable, Refused, each, empty_or
from gateway import exchange
from gateway.described import about
from gateway.errors import ApiError, bad_field
from gateway.refusals import place_of

# Well-behaved clients send these with every request, so `--strict` accepts them as well.
NEUTRAL = each(
    {
        "a label, or about a provider's service": "user safety_identifier metadata request_id store"
        " service_tier priority prompt_cache_key prompt_cache_retention verbosity speed"
        " user_profile_id client_metadata stream_options summary generate_summary cache_control"
        " citations caller allowed_callers eager_input_streaming detail annotations",
        "the server chooses": "cache_prompt id_slot penalize_nl n_keep n_discard min_keep"
        " speculative.n_max speculative.n_min speculative.p_min guided_decoding_backend",
    }
)
_ONE = Refused("ask once for each answer", empty_or(1))
_WHOLE = Refused("a grammar applies from the start of the answer")
_SEND_FORMAT = Refused("send response_format, or a grammar")
_REFUSED = {
    "stop_regex": Refused("send strings as stop"),
    "bad_words": Refused("use logit_bias with -100"),
    "allowed_token_ids": Refused("constrain the answer by guided_choice or a grammar"),
    **dict.fromkeys(("grammar_lazy", "grammar_triggers"), _WHOLE),
    "regex": Refused("send guided_regex"),
    **dict.fromkeys(("ebnf", "structural_tag"), _SEND_FORMAT),
    "image_data": Refused("send images as image_url parts of a message"),
    "t_max_predict_ms": Refused("limit an answer by max_tokens", empty_or(-1)),
    "truncate_prompt_tokens": Refused("shorten the prompt", empty_or(-1)),
}
_FORMATS = (
    "response_format grammar structured_outputs json_schema guided_json guided_regex guided_choice"
    " guided_grammar".split()
)

COMPLETION = FieldTable(_REFUSED, NEUTRAL)
CHAT = FieldTable(
    {
        **_REFUSED,
        "modalities": Refused("answers are text; leave it out", empty_or(["text"])),
        "chat_template": Refused("send variables of the model's own as chat_template_kwargs"),
        "documents": Refused("write them into a message"),
        "echo": Refused("use /v1/completions to see the prompt"),
        "suffix": Refused("use /v1/completions"),
    },
    NEUTRAL,
)
INFILL = FieldTable(
    {
        **{name: row for name, row in _REFUSED.items() if name != "t_max_predict_ms"},
        "suffix": Refused("use /v1/infill with input_suffix"),
        **dict.fromkeys(("n", "best_of"), _ONE),
        "echo": Refused("use /v1/completions"),
    },
    NEUTRAL,
)
# By which other APIs choose an adapter of the model's file.
_ADAPTER = dict.fromkeys(("adapters", "lora"), Refused("send the adapter's name as model"))
MESSAGES = FieldTable(
    _ADAPTER
    | {
        "n": _ONE,
        **dict.fromkeys(("logprobs", "top_logprobs"), Refused("use /v1/chat/completions")),
        **dict.fromkeys(_FORMATS, Refused("send output_config.format")),
        "stop": Refused("send stop_sequences"),
        "thread": Refused("conversations are not stored: send all messages"),
        "compaction": Refused("ask for a summary in a message"),
    },
    NEUTRAL,
)
RESPONSES = FieldTable(
    _ADAPTER
    | {
        "n": _ONE,
        "logprobs": Refused("send include with message.output_text.logprobs"),
        **dict.fromkeys(_FORMATS, Refused("send text.format")),
        "prompt": Refused("prompt templates are not stored: send instructions and input"),
        "conversation": Refused("conversations are not stored: use previous_response_id"),
    },
    NEUTRAL,
)
TRANSCRIPTS = FieldTable(
    {
        "include": Refused("log-probabilities of transcripts are not returned: leave it out"),
        **dict.fromkeys(
            ("known_speaker_names", "known_speaker_references"),
            Refused("speakers are not distinguished: leave it out"),
        ),
    },
    NEUTRAL | {"chunking_strategy": "recordings are divided at pauses"},
)
Place = tuple[str | int, ...]
DROPPED: tuple[()] = ()  # replaces a removed value; a longer tuple replaces a value by several
MOST_REPAIRS = 10_000  # repairs in one round, which takes 0.2 s
_ROUNDS = 8  # rounds, because a repair may reveal others: a nested field, a kind inside a kind
_FORMAT_PATHS: set[Place] = {  # where a request says what the answer must look like
    ("response_format",),
    ("structured_outputs",),
    ("output_format",),
    ("text", "format"),
    ("output_config", "format"),
}
_UNSET = frozenset(  # kinds of errors that an empty value causes where it means absent
    "dict_type list_type model_type model_attributes_type string_too_short literal_error"
    " blocks_type string_type int_type float_type bool_type unsupported".split()
)
_REDUCED = frozenset(  # fields that are reduced to their maximum if they exceed it
    "logprobs top_logprobs n_probs max_tokens max_completion_tokens max_output_tokens"
    " n_predict num_predict".split()
)
_MODEL = "A model of the models folder, or its alias; may be left out if there is only one."


def without_refused(body: Any, table: FieldTable) -> Any:
    """Return the body without refused fields whose value means "off".

    Raises ApiError for a refused field with another value.
    """
    if not isinstance(body, dict) or table.refused.keys().isdisjoint(body):
        return body
    if name := table.first_refused(body):
        message = f"{named(name)} is not supported with this value: {table.refused[name].instead}"
        raise bad_field(message, "unsupported_parameter")
    return {name: value for name, value in body.items() if name not in table.refused}


def tolerable(
    sentence: str, instead: Any = DROPPED, *, up: int = 0, lossless: bool = False
) -> PydanticCustomError:
    """Return an error that is raised only with `--strict`; otherwise `instead` replaces the object.

    up: how many levels above the object the replaced object is.
    lossless: the replacement means the same, so it is not listed.
    """
    repair = {"instead": instead, "up": up, "lossless": lossless}
    return PydanticCustomError("tolerable", "{sentence}", {"sentence": sentence} | repair)


def known(words: Collection[str]) -> BeforeValidator:
    """Return a validator for a string that is one of these words.

    Other strings, and numbers, are left out.
    """

    def check(word: Any) -> Any:
        if isinstance(word, str | float | int) and word not in words:
            raise tolerable(f"{str(word)[:64]} is not served: send one of {', '.join(words)}")
        return word

    return BeforeValidator(check, json_schema_input_type=str)


def checked(body: Any, check: Callable[[Any], Any]) -> Any:
    """Return the result of `check` for a body, which is repaired if necessary.

    Raises ValidationError for what is not repaired, ApiError for too many repairs.
    """
    strict = exchange.current().strict
    for _ in range(_ROUNDS):
        try:
            return check(body)
        except ValidationError as failure:
            if failure.error_count() > MOST_REPAIRS:
                raise ApiError(
                    400,
                    f"the body has more than {MOST_REPAIRS} fields that are not known here, or"
                    " are wrong: leave them out",
                ) from None
            edits: dict[str | int, Any] = {}
            for problem in failure.errors(include_url=False):
                _plan(edits, problem, strict)
            if not edits:
                raise
            body = _edited(body, edits)
    return check(body)


def _plan(edits: dict[str | int, Any], problem: Mapping[str, Any], strict: bool) -> None:
    """Add the repair of a problem, if there is one, to the edits, which are a tree by path."""
    place: Place = place_of(problem["loc"])
    kind, value = problem["type"], problem["input"]
    unset = value in ([], {}, "") and kind in _UNSET  # PHP writes an empty object as a list
    if kind == "extra_forbidden":
        # A client's own field name may look like that of an alternative.
        place = (*place_of(problem["loc"][:-1]), problem["loc"][-1])
        forms = any(place[:size] in _FORMAT_PATHS and len(place) > size for size in (1, 2))
        may_go = place[-1] in NEUTRAL if strict else not forms
        if not may_go and value:  # programs send empty values for unused fields
            return
        _edit(edits, place, DROPPED)
        if value is not None:
            exchange.current().ignore(_name(place))
    elif strict:
        return
    elif kind == "tolerable":
        repair = problem["ctx"]
        target = place[: len(place) - repair["up"]]
        _edit(edits, target, repair["instead"])
        if not repair["lossless"]:
            tag = value if repair["up"] and isinstance(value, str) else ""
            exchange.current().ignore(_name(target) + (f"[{tag}]" if tag else ""))
    elif (value is None or unset) and place and isinstance(place[-1], str):
        _edit(edits, place, DROPPED)  # null means absent; a field that is required is then missing
    elif kind == "int_type" and isinstance(value, float) and value.is_integer():
        _edit(edits, place, int(value))
    elif kind == "less_than_equal" and place[-1] in _REDUCED:
        _edit(edits, place, int(problem["ctx"]["le"]))
        exchange.current().ignore(_name(place))


def _edit(edits: dict[str | int, Any], place: Place, value: Any) -> None:
    for step in place[:-1]:
        inner = edits.setdefault(step, _Edits())
        if not isinstance(inner, _Edits):
            return  # inside a part that is removed itself
        edits = inner
    if place:
        edits[place[-1]] = value


class _Edits(dict[str | int, Any]):
    """The edits below a path, in a separate type, so that they are never mistaken for a value."""


def _edited(node: Any, edits: Mapping[str | int, Any]) -> Any:
    """Return a copy of a body with the edits; unchanged parts are shared with the body."""
    copy: Any = list(node) if isinstance(node, list) else dict(node)
    for step, edit in edits.items():
        if step not in (range(len(copy)) if isinstance(copy, list) else copy):
            continue  # created by a validator, and not in the body
        below = copy[step]
        if not isinstance(edit, _Edits):
            copy[step] = edit
        elif isinstance(below, dict | list):
            copy[step] = _edited(below, edit)
    if isinstance(copy, list):
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in copy)
        return [each for several in entries for each in several]
    return {name: each for name, each in copy.items() if each is not DROPPED}


def _name(place: Place) -> str:
    """Return the name of a path: `tools[].defer_loading` for `("tools", 0, "defer_loading")`."""
    return "".join("[]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".")


class Strict(BaseModel):
    """A part of a request: JSON types as they are, finite numbers, and no unknown fields."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True
    )


class Request(Strict):
    """The body of a request, without fields that have no meaning here.

    others: fields beyond the schema. One that would change the answer, and cannot be honoured,
        raises ApiError.
    """

    others: ClassVar[FieldTable] = FieldTable()

    model: str | None = Field(None, min_length=1, description=_MODEL)

    @model_validator(mode="wrap")
    @classmethod
    def _tolerate(cls, body: Any, check: ModelWrapValidatorHandler[Any]) -> Any:
        return checked(without_refused(body, cls.others), check)


class StreamOptions(Strict):
    """What a stream contains in addition to the answer."""

    include_usage: bool | None = about("Whether a last chunk without choices has the usage.")


class TextRequest(Request):
    """The fields that chat and completion requests share, apart from sampling."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = about("llama.cpp: a stream reports prompt progress.")

    @property
    def wants_usage(self) -> bool | None:
        """Whether a stream ends with a chunk that has the usage; None if the client did not say."""
        return self.stream_options.include_usage if self.stream_options else None
