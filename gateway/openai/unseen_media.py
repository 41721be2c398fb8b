"""Media in a conversation with a model that accepts only text.

Agents send the whole conversation with every request, so an image of a tool's result, or of a time
when another model answered, would end the conversation if it were refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from common.field_names import named
from gateway import exchange
from gateway.errors import bad_field
from gateway.openai.messages import ChatMessage, ContentPart, ResultPart

_TEXTS = ("text", "refusal")
_KINDS = {"video_url": "A video", "input_audio": "A recording", "audio_url": "A recording"}


def has_media(messages: Iterable[ChatMessage]) -> bool:
    return any(_is_medium(part) for message in messages for part in _parts(message.content))


def without_media(messages: Sequence[ChatMessage], model: str) -> list[ChatMessage]:
    """Return the messages with a note instead of each image, video and audio.

    Raises ApiError for media that the newest user message itself shows, because the question is
    about them; with `--strict`, for any.

    model: the name of a model that accepts only text.
    """
    newest = max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
    changed = list(messages)
    for at, message in enumerate(messages):
        if any(map(_is_medium, _parts(message.content))):
            content = _readable(message.content, f"messages[{at}]", model, asked=at == newest)
            changed[at] = message.model_copy(update={"content": content})
    return changed


def _readable(content: Any, place: str, model: str, *, asked: bool) -> list[Any]:
    here = exchange.current()
    parts: list[Any] = []
    for at, part in enumerate(content):
        path = f"{place}.content[{at}]"
        if isinstance(part, ResultPart) and isinstance(part.content, list):
            inner = _readable(part.content, path, model, asked=False)
            part = part.model_copy(update={"content": inner})
        elif _is_medium(part):
            path += f".{part.field}"
            if asked or here.strict:
                raise bad_field(
                    f"{named(path)} is not text, and the model {model} accepts only text"
                )
            here.ignore(f"messages[].content[][{part.type}]")
            what = _KINDS.get(part.field, "An image")
            text = f"[{what} could not be shown: this model accepts only text.]"
            part = ContentPart.model_validate({"type": "text", "text": text})
        parts.append(part)
    return parts


def _is_medium(part: Any) -> bool:
    return isinstance(part, ContentPart) and part.type not in _TEXTS


def _parts(content: Any) -> Iterator[Any]:
    """Yield the parts of a message's content, and those inside results."""
    for part in content if isinstance(content, list) else ():
        yield part
        if isinstance(part, ResultPart):
            yield from _parts(part.content)
