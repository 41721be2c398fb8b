"""The client's names for the protocol's fields, for errors of a backend."""

from __future__ import annotations

from common.field_names import in_snake_case
from gateway.openai.answer_format import constraint_of
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.completion import CompletionRequest
from gateway.openai.messages import ContentPart, turns_of
from gateway.openai.sampling import NAMES
from wire import backend_pb2 as pb

AnyRequest = ChatCompletionRequest | CompletionRequest
_SAME = {field.name: in_snake_case(field.name) for field in pb.PredictOptions.DESCRIPTOR.fields}
_PROMPT = ("Messages", "Prompt", "Images", "Videos", "Audios", "Metadata mlx.prompt_token_ids")


def names_of(request: AnyRequest) -> dict[str, str]:
    """Return the name of each field of the protocol in a request whose fields are all read."""
    names = _SAME | {
        wire: next((name for name in given if getattr(request, name, None) is not None), given[0])
        for wire, given in NAMES.items()
    }
    constraint = constraint_of(request)
    names["Grammar"] = constraint.field if constraint is not None else "response_format"
    if isinstance(request, ChatCompletionRequest):
        if "enable_thinking" in (request.chat_template_kwargs or {}):
            names["Metadata enable_thinking"] = "chat_template_kwargs.enable_thinking"
        return names | dict.fromkeys(_PROMPT, "messages") | _places(request)
    names["Metadata mlx.infill"] = "suffix" if request.suffix else "input_suffix"
    return names | dict.fromkeys(_PROMPT, "prompt")


def names_of_choice(request: AnyRequest, names: dict[str, str], choice: int) -> dict[str, str]:
    """Return the names for the error of one choice, from the names of the request."""
    given = request.prompt if isinstance(request, CompletionRequest) else ""
    if not isinstance(given, list) or isinstance(given[0], int):
        return names
    return names | dict.fromkeys(_PROMPT, f"prompt[{choice // (request.n or 1)}]")


def _places(request: ChatCompletionRequest) -> dict[str, str]:
    """Return the paths of all messages and media; a kind without an index means its first."""
    found: dict[str, str] = {}
    kinds = {"source": "Images", "image_url": "Images", "video_url": "Videos"}
    kinds |= dict.fromkeys(("input_audio", "audio_url"), "Audios")
    counts = dict.fromkeys(kinds.values(), 0)
    for at, turn in enumerate(turns_of(request.messages)):
        found[f"Messages[{at}]"] = turn.place
        for place, part in turn.parts:
            if isinstance(part, ContentPart) and (wire := kinds.get(part.field)):
                path = f"{place}.{part.field}"
                found.setdefault(wire, path)
                found[f"{wire}[{counts[wire]}]"] = path
                counts[wire] += 1
    return found
