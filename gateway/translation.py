"""Requests of other APIs as chat requests, with errors that name what the client itself sent.

A translation keeps beside the chat request where each of its parts came from: chat path → path of
the client's own body. The longest path that begins an error's `param` names the place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gateway import refusals
from gateway.errors import ApiError, bad_field, found_in, renamed
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.problems import likeliest


@dataclass(frozen=True, slots=True)
class Translation:
    """A chat request, and where its parts came from."""

    chat: ChatCompletionRequest
    places: Mapping[str, str]

    def named(self, error: ApiError) -> ApiError:
        return named(error, self.places)


def translate(fields: Mapping[str, Any], places: Mapping[str, str]) -> Translation:
    """The chat request of these fields; null counts as absent. Raises ApiError.

    Tools are distinguished by name, so every name must be unique.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        chat = ChatCompletionRequest.model_validate(given)
        _require_own_names([tool.function.name for tool in chat.tools or ()])
        return Translation(chat, places)
    except ValidationError as failure:
        raise named(refusals.invalid(likeliest(failure.errors())), places) from None
    except ApiError as error:
        raise named(error, places) from None


def _require_own_names(tools: Sequence[str]) -> None:
    seen: set[str] = set()
    for index, name in enumerate(tools):
        if name in seen:
            place = f"tools[{index}].function.name"
            sentence = f"{place} is {name!r}, which another tool has: give each its own name"
            raise bad_field(place, sentence)
        seen.add(name)


def named(error: ApiError, places: Mapping[str, str]) -> ApiError:
    if error.param is None:
        return error
    return renamed(error, error.param, found_in(places, error.param)[0])
