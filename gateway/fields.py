"""The bases of request schemas, and the fields beyond them that are refused.

A field beyond a schema that would change the answer is refused by name, unless it has the value
that means "off", which clients often send. `gateway.repairs` treats all other unknown fields.
docs/gateway.md lists the refused fields.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from common.field_names import named
from common.field_table import FieldTable, Refused, empty_or, one_of
from gateway.described import about
from gateway.errors import bad_field
from gateway.repairs import NEUTRAL, checked

_ONE = Refused("ask once for each answer", empty_or(1))
_WHOLE = Refused("a grammar applies from the start of the answer")
_REFUSED = {
    "stop_regex": Refused("send strings as stop"),
    "bad_words": Refused("use logit_bias with -100"),
    "allowed_token_ids": Refused("constrain the answer by guided_choice or a grammar"),
    **dict.fromkeys(("grammar_lazy", "grammar_triggers"), _WHOLE),
    "structural_tag": Refused("send response_format, or a grammar"),
    "image_data": Refused("send images as image_url parts of a message"),
    "t_max_predict_ms": Refused("limit an answer by max_tokens", empty_or(-1)),
    "truncate_prompt_tokens": Refused("shorten the prompt", empty_or(-1)),
}
_FORMATS = (
    "response_format grammar structured_outputs json_schema guided_json guided_regex guided_choice"
    " guided_grammar regex ebnf".split()
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
FIM = FieldTable(
    {
        **_REFUSED,
        "best_of": _ONE,
        **dict.fromkeys(("echo", "logprobs", "n_probs"), Refused("use /v1/completions")),
    },
    NEUTRAL,
)
# Fields by which other APIs choose an adapter.
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
_AS_FLOATS = Refused("vectors are lists of floats, or base64 if encoding_format says so")
EMBEDDINGS = FieldTable({
    "output_dtype": replace(_AS_FLOATS, off=empty_or("float")),
    "embedding_type": replace(_AS_FLOATS, off=empty_or("float", ["float"])),
    "embedding_types": replace(_AS_FLOATS, off=empty_or(["float"])),
    "return_multivector": Refused("each text has one vector"),
    "late_chunking": Refused("each text is embedded alone"),
    "truncate_prompt_tokens": _REFUSED["truncate_prompt_tokens"],
})  # fmt: skip
RERANK = FieldTable({
    "raw_scores": Refused("the model's files decide the function of scores"),
    **dict.fromkeys(
        ("use_activation", "activation"),
        Refused("the model's files decide the function of scores", one_of(None, True)),
    ),
    "truncate_prompt_tokens": _REFUSED["truncate_prompt_tokens"],
})  # fmt: skip
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


class Strict(BaseModel):
    """A part of a request: JSON types as they are, finite numbers, and no unknown fields."""

    # Schemas are built at their first use, which takes up to 40 ms. To build all at the start would
    # take a sixth of it.
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True, defer_build=True
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

    include_usage: bool | None = about("Whether the last chunk has the usage.")


class TextRequest(Request):
    """The fields that chat and completion requests share, apart from sampling."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = about("llama.cpp: a stream reports prompt progress.")
