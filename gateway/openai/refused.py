"""Fields of other servers that would change the answer and are not supported: refused by name.

Any other unknown field is left out and listed. Clients often send the value that means "off", which
is accepted. A test covers both sides of every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.field_names import named
from gateway.errors import bad_field


@dataclass(frozen=True, slots=True)
class Refused:
    """What to do instead, and which values mean "off" besides null, false, 0 and empty."""

    instead: str
    off: tuple[Any, ...] = ()


_WHOLE = "a grammar applies from the start of the answer"
_FORM = "send response_format, or a grammar"

COMMON: Mapping[str, Refused] = {
    "stop_regex": Refused("send texts as stop"),
    "bad_words": Refused("use logit_bias with -100"),
    "allowed_token_ids": Refused("constrain the answer by guided_choice or a grammar"),
    "grammar_lazy": Refused(_WHOLE),
    "grammar_triggers": Refused(_WHOLE),
    "regex": Refused("send guided_regex"),
    "ebnf": Refused(_FORM),
    "structural_tag": Refused(_FORM),
    "lora": Refused("adapters are set in the model's file: send adapters or another model"),
    "image_data": Refused("send images as image_url parts of a message"),
    "t_max_predict_ms": Refused("limit an answer by max_tokens", (-1,)),
    "truncate_prompt_tokens": Refused("shorten the prompt", (-1,)),
}
CHAT: Mapping[str, Refused] = {
    **COMMON,
    "modalities": Refused("answers are text; leave it out", (["text"],)),
    "chat_template": Refused("the model's own is used; send its variables as chat_template_kwargs"),
    "documents": Refused("write them into a message"),
    "echo": Refused("use /v1/completions to see the prompt"),
    "suffix": Refused("use /v1/completions"),
}
COMPLETION: Mapping[str, Refused] = COMMON
INFILL: Mapping[str, Refused] = {
    **{name: row for name, row in COMMON.items() if name != "t_max_predict_ms"},
    "suffix": Refused("send input_suffix"),
    **dict.fromkeys(("n", "best_of"), Refused("ask once for each answer", (1,))),
    "echo": Refused("use /v1/completions with suffix"),
}
_FORMATS = "response_format grammar structured_outputs json_schema guided_json guided_regex".split()
_FORMATS += ["guided_choice", "guided_grammar"]
MESSAGES: Mapping[str, Refused] = {
    **dict.fromkeys(_FORMATS, Refused("send output_config.format")),
    "stop": Refused("send stop_sequences"),
}
RESPONSES: Mapping[str, Refused] = {
    **dict.fromkeys(_FORMATS, Refused("send text.format")),
    "prompt": Refused("prompt templates are not kept: send instructions and input"),
    "conversation": Refused("conversations are not kept: use previous_response_id"),
}


def without_refused(body: Any, table: Mapping[str, Refused]) -> Any:
    """The body without fields that mean "off". Raises ApiError for one that does not."""
    if not isinstance(body, dict) or table.keys().isdisjoint(body):
        return body
    for name in table.keys() & body.keys():
        value, row = body[name], table[name]
        if value and value not in row.off:
            message = f"{named(name)} is not supported with this value: {row.instead}"
            raise bad_field(message, "unsupported_parameter")
    return {name: value for name, value in body.items() if name not in table}
