"""Translates requests of other APIs to chat requests, with errors about the client's own fields.

A translation stores where each part of the chat request came from: chat path → path in the client's
own body. The longest path that is a prefix of an error's `param` identifies the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.field_names import named
from common.wording import shown
from gateway.errors import ApiError, bad_field, found_in
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.refusals import validated

Json = dict[str, Any]


class Conversation:
    """Chat messages so far, each with the path in the client's body that it came from."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.places: dict[str, str] = {}

    def system(self, texts: Sequence[str], place: str) -> None:
        """Add one system message of several texts: many templates allow one, at the beginning."""
        self.add({"role": "system", "content": "\n\n".join(texts)}, place)

    def add(self, message: Json, place: str, content: str = "content") -> None:
        """Add a message; `content` is the name of its content in the client's body."""
        here = f"messages[{len(self.messages)}]"
        self.places[here] = place
        if isinstance(message["content"], list):
            self._note(message["content"], f"{here}.content", f"{place}.{content}")
        self.messages.append(message)

    def _note(self, parts: Sequence[Json], here: str, place: str) -> None:
        for at, part in enumerate(parts):
            self.places[f"{here}[{at}]"] = f"{place}[{at}]"
            self._note(part.get("content", ()), f"{here}[{at}].content", f"{place}[{at}].content")


@dataclass(frozen=True, slots=True)
class Translation:
    """A chat request, and where in the client's body its parts came from."""

    chat: ChatCompletionRequest
    places: Mapping[str, str]

    def named(self, error: ApiError) -> ApiError:
        return _placed(error, self.places)


def translate(fields: Mapping[str, Any], places: Mapping[str, str]) -> Translation:
    """Return the chat request of these fields; null counts as absent. Raises ApiError.

    Tools are distinguished by name, so every name must be unique.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        chat = validated(ChatCompletionRequest, given)
        _require_own_names([tool.function.name for tool in chat.tools or ()])
        return Translation(chat, places)
    except ApiError as error:
        raise _placed(error, places) from None


def _require_own_names(tools: Sequence[str]) -> None:
    seen: set[str] = set()
    for index, name in enumerate(tools):
        if name in seen:
            place = named(f"tools[{index}].function.name")
            raise bad_field(
                f"{place} is {shown(name)}, the name of another tool as well: rename one"
            )
        seen.add(name)


def _placed(error: ApiError, places: Mapping[str, str]) -> ApiError:
    return error.renamed(lambda name: found_in(places, name)[0])
