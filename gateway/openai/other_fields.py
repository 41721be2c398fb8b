"""Fields that requests may have beyond their schemas: those of other servers, and labels.

A field that would change the answer and is not supported is refused by name; clients often send the
value that means "off", which is accepted. Labels have no effect. Any other unknown field is ignored
and listed, and refused with `--strict`. docs/gateway.md lists the refused fields.
"""

from __future__ import annotations

from typing import Any

from common.field_names import named
from common.field_table import FieldTable, Refused, each, empty_or
from gateway.errors import bad_field

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
_FORM = Refused("send response_format, or a grammar")
_OTHERS = {
    "stop_regex": Refused("send texts as stop"),
    "bad_words": Refused("use logit_bias with -100"),
    "allowed_token_ids": Refused("constrain the answer by guided_choice or a grammar"),
    **dict.fromkeys(("grammar_lazy", "grammar_triggers"), _WHOLE),
    "regex": Refused("send guided_regex"),
    **dict.fromkeys(("ebnf", "structural_tag"), _FORM),
    "image_data": Refused("send images as image_url parts of a message"),
    "t_max_predict_ms": Refused("limit an answer by max_tokens", empty_or(-1)),
    "truncate_prompt_tokens": Refused("shorten the prompt", empty_or(-1)),
}
_FORMATS = (
    "response_format grammar structured_outputs json_schema guided_json guided_regex guided_choice"
    " guided_grammar".split()
)

COMPLETION = FieldTable(_OTHERS, NEUTRAL)
CHAT = FieldTable(
    {
        **_OTHERS,
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
        **{name: row for name, row in _OTHERS.items() if name != "t_max_predict_ms"},
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


def without_refused(body: Any, table: FieldTable) -> Any:
    """Return the body without refused fields that mean "off".

    Raises ApiError for one that does not.
    """
    if not isinstance(body, dict) or table.refused.keys().isdisjoint(body):
        return body
    if name := table.first_refused(body):
        message = f"{named(name)} is not supported with this value: {table.refused[name].instead}"
        raise bad_field(message, "unsupported_parameter")
    return {name: value for name, value in body.items() if name not in table.refused}
