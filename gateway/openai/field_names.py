"""What a request calls the fields of the wire, where it has a choice of names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.completion_request import CompletionRequest
from gateway.openai.format_to_wire import constraint_of
from gateway.wire_names import Names

# The first that was sent is the one to name.
_NAMES = {
    "Tokens": ("max_completion_tokens", "max_tokens", "n_predict"),
    "Penalty": ("repeat_penalty", "repetition_penalty"),
    "Repeat": ("repeat_last_n", "repetition_context_size"),
    "TopLogprobs": ("top_logprobs", "n_probs", "logprobs"),
    "Tools": ("tools", "functions"),
    "ToolChoice": ("tool_choice", "function_call"),
}


_PROMPT = ("Messages", "Prompt", "Metadata mlx.prompt_token_ids")


def names_of(request: ChatCompletionRequest | CompletionRequest) -> dict[str, str]:
    """Wire field → field of this request, over `gateway.wire_names.CHAT`."""
    sent = {wire: _first_sent(request, names) for wire, names in _NAMES.items()}
    names = {wire: name for wire, name in sent.items() if name}
    constraint = constraint_of(request)
    if constraint is not None:
        names["Grammar"] = constraint.field
    return names if isinstance(request, CompletionRequest) else names | _media(request)


def names_of_answer(
    request: ChatCompletionRequest | CompletionRequest, names: Names, choice: int
) -> Names:
    """The names of a request where one of its answers is spoken of: its own prompt."""
    if not isinstance(request, CompletionRequest):
        return names
    place = "prompt"
    if isinstance(request.prompt, list) and not isinstance(request.prompt[0], int):
        place = f"prompt[{choice // (request.n or 1)}]"
    return {**names, **dict.fromkeys(_PROMPT, place)}


def _media(request: ChatCompletionRequest) -> dict[str, str]:
    """Where every image and every sound is; the bare name of a kind stands for its first."""
    found: dict[str, str] = {}
    counts = {"Images": 0, "Audios": 0}
    for index, message in enumerate(request.messages):
        parts = message.content if isinstance(message.content, list) else ()
        for place, part in enumerate(parts):
            wire = {"image_url": "Images", "input_audio": "Audios"}.get(part.type)
            if wire:
                path = f"messages[{index}].content[{place}].{part.type}"
                found.setdefault(wire, path)
                found[f"{wire}[{counts[wire]}]"] = path
                counts[wire] += 1
    return found


def _first_sent(request: Any, names: Iterable[str]) -> str:
    return next((name for name in names if getattr(request, name, None) is not None), "")
