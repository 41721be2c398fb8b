"""The schemas of OpenAI's answers in the OpenAPI document. The answers themselves are dicts."""

from __future__ import annotations

from gateway.refusals import INTEGER, NUMBER, TEXT, TEXT_OR_NULL, list_of, one_of, schema_of

CACHED = schema_of(cached_tokens=INTEGER)
THOUGHT = schema_of(reasoning_tokens=INTEGER)
_USAGE = schema_of(
    prompt_tokens=INTEGER | {"description": "Each prompt counts once."},
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=CACHED,
    completion_tokens_details=THOUGHT,
)
_TOKEN = {"token": TEXT, "bytes": list_of(INTEGER), "logprob": NUMBER}
_TOKENS = list_of(schema_of(**_TOKEN, top_logprobs=list_of(schema_of(**_TOKEN))))
_NULL = {"type": "null"}
_FUNCTION = schema_of(name=TEXT, arguments=TEXT | {"description": "JSON."})
_CALL = schema_of(id=TEXT, type=one_of("function"), function=_FUNCTION)
_CUSTOM = schema_of(id=TEXT, type=one_of("custom"), custom=schema_of(name=TEXT, input=TEXT))
_MESSAGE = schema_of(
    {
        "reasoning_content": TEXT | {"description": "What the model thought."},
        "tool_calls": list_of({"oneOf": [_CALL, _CUSTOM]}),
        "function_call": _FUNCTION | {"description": "Legacy: the call."},
    },
    role=one_of("assistant"),
    content=TEXT_OR_NULL,
    refusal=_NULL,
    annotations=list_of({"type": "object"}),
)


def _answer(kind: str, **choice: object) -> dict[str, object]:
    return schema_of(
        id=TEXT,
        object=one_of(kind),
        created=INTEGER,
        model=TEXT,
        system_fingerprint=TEXT,
        choices=list_of(schema_of(index=INTEGER, **choice)),
        usage=_USAGE,
    )


CHAT_COMPLETION = _answer(
    "chat.completion",
    message=_MESSAGE,
    logprobs={"anyOf": [schema_of(content=_TOKENS, refusal=_NULL), _NULL]},
    finish_reason=one_of("stop", "length", "tool_calls", "function_call"),
)
# The legacy form: four lists of one length. The first token of a prompt has no probability.
_LISTS = schema_of(
    tokens=list_of(TEXT),
    token_logprobs=list_of({"type": ["number", "null"]}),
    top_logprobs=list_of({"type": ["object", "null"], "additionalProperties": NUMBER}),
    text_offset=list_of(INTEGER),
)
COMPLETION = _answer(
    "text_completion",
    text=TEXT,
    logprobs={"anyOf": [_LISTS, _NULL]},
    finish_reason=one_of("stop", "length"),
)
