"""What the wire calls a field, and what a client calls it.

Backends name the fields of `PredictOptions` in their refusals; clients never sent those. This is
the one table between the two, and whoever generates may lay its own names over it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from gateway.errors import ApiError

Names = Mapping[str, str]

CHAT: Names = {
    "Tokens": "max_tokens",
    "Temperature": "temperature",
    "TopP": "top_p",
    "TopK": "top_k",
    "MinP": "min_p",
    "TypicalP": "typical_p",
    "Penalty": "repeat_penalty",
    "Repeat": "repeat_last_n",
    "FrequencyPenalty": "frequency_penalty",
    "PresencePenalty": "presence_penalty",
    "LogitBias": "logit_bias",
    "Seed": "seed",
    "StopPrompts": "stop",
    "IgnoreEOS": "ignore_eos",
    "NDraft": "num_draft_tokens",
    "Logprobs": "logprobs",
    "TopLogprobs": "top_logprobs",
    "Grammar": "response_format",
    "Messages": "messages",
    "Prompt": "prompt",
    "Images": "messages",
    "Audios": "messages",
    "Tools": "tools",
    "ToolChoice": "tool_choice",
    "ModelIdentity": "model",
    "Metadata mlx.min_tokens": "min_tokens",
    "Metadata mlx.xtc_probability": "xtc_probability",
    "Metadata mlx.xtc_threshold": "xtc_threshold",
    "Metadata mlx.presence_window": "presence_context_size",
    "Metadata mlx.frequency_window": "frequency_context_size",
    "Metadata mlx.continue_final_message": "continue_final_message",
    "Metadata mlx.parallel_tool_calls": "parallel_tool_calls",
    "Metadata mlx.prompt_token_ids": "prompt",
    "Metadata chat_template_kwargs": "chat_template_kwargs",
    "Metadata enable_thinking": "enable_thinking",
    "Metadata reasoning_effort": "reasoning_effort",
    "ContextSize": "context_size",
    "Embeddings": "input",
    "EmbeddingTokens": "input",
    # What these endpoints call as the wire does.
    **{name: name for name in ("tokens", "candidates", "query", "documents")},
}
# Sentences without a field's name, by how they begin: which field they are about.
_SUBJECTS: Mapping[str, str] = {
    "the grammar ": "Grammar",
    "the JSON schema": "Grammar",
    "the Lark grammar ": "Grammar",
    "the regular expression ": "Grammar",
    "the tools' schemas ": "Tools",
    "tool calls cannot be enforced ": "ToolChoice",
    "strict tools cannot be enforced ": "Tools",
    "tools beside a form ": "Grammar",
    "the model's chat template ": "Messages",
    "the parameters of the tool ": "Tools",
    "the tool ": "Tools",
    "the query with documents": "documents",
    "nothing comes before the first token of ": "Prompt",
}
_TOO_LONG = re.compile(r"^(the )?prompt (has|and \S+ have) .* but the context holds ")
_NAME = re.compile(
    r"(?<![\w.])("
    + "|".join(sorted(map(re.escape, CHAT), key=len, reverse=True))
    + r")(?![\w.])(\[\d+\])?"
)
_REST = re.compile(r"(?:\[\d+\])*(?:\.\w+)*")


def translated(error: ApiError, names: Names) -> ApiError:
    """A backend's refusal in the client's words, with `param` where one field is to blame."""
    if error.status != 400 or error.param is not None:
        return error
    known = {**CHAT, **names}
    message = _NAME.sub(lambda match: _named(match, known), error.message)
    if _TOO_LONG.match(error.message):
        param = known["Messages"]
        return replace(error, message=message, code="context_length_exceeded", param=param)
    return replace(error, message=message, param=_param(error.message, known))


def _named(match: re.Match[str], known: Names) -> str:
    """The client's name of a field, or of an item of a field that has names of its own."""
    return known.get(match[0]) or known[match[1]] + (match[2] or "")


def _param(sentence: str, known: Names) -> str | None:
    """The field that a sentence begins with, or is about."""
    if match := _NAME.match(sentence):
        rest = _REST.match(sentence, match.end())
        return _named(match, known) + (rest[0] if rest else "")
    for beginning, field in _SUBJECTS.items():
        if sentence.startswith(beginning):
            return known[field]
    return None
