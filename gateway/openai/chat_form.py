"""What the client asked for in a chat answer; used for whole and streamed answers alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.tools_to_wire import is_legacy

_TOLD = ("token", "bytes", "logprob")


@dataclass(frozen=True, slots=True)
class ChatForm:
    """`legacy`: calls as function_call. `usage`: a stream ends with a usage chunk.

    progress: a stream tells how far the prompt is, as llama.cpp's do.
    """

    choices: int = 1
    legacy: bool = False
    reasoning: bool = True
    logprobs: bool = False
    usage: bool = False
    progress: bool = False


def form_of(request: ChatCompletionRequest) -> ChatForm:
    options = request.stream_options
    return ChatForm(
        choices=request.n or 1,
        legacy=is_legacy(request),
        reasoning=request.include_reasoning is not False,
        logprobs=wants_logprobs(request),
        usage=options is not None and options.include_usage is True,
        progress=request.return_progress is True,
    )


def wants_logprobs(request: ChatCompletionRequest) -> bool:
    """Whether log-probabilities are sent at all: a number of 0 or below turns them off."""
    return request.logprobs is True or (request.logprobs or 0) > 0 or (request.n_probs or 0) > 0


def finish_reason(reason: str, *, called: bool, legacy: bool) -> str:
    """OpenAI's word for the end: a call that was cut off is a matter of length."""
    if reason == "stop" and called:
        return "function_call" if legacy else "tool_calls"
    return reason


def chat_logprobs(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The wire's entries in OpenAI's form, which has no token ids."""
    content = [
        {
            **{key: entry[key] for key in _TOLD},
            "top_logprobs": [{key: top[key] for key in _TOLD} for top in entry["top_logprobs"]],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}
