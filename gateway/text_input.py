"""The text in a custom tool's call, which the model writes as the only argument of a function."""

from __future__ import annotations

from pydantic_core import from_json


class TextInput:
    """The input of one call, as far as it was generated; `arguments` are what the model wrote."""

    def __init__(self) -> None:
        self.arguments = ""
        self._sent = 0  # characters of the text

    def add(self, arguments: str) -> str:
        """The next part of the text."""
        self.arguments += arguments
        return self._next(_text_in(self.arguments) or "")

    def rest(self) -> str:
        """The arguments of a complete call as they are, if they have another form."""
        other = not self._sent and _text_in(self.arguments) is None
        return self._next(self.arguments) if other else ""

    def _next(self, text: str) -> str:
        start, self._sent = self._sent, max(self._sent, len(text))
        return text[start:]


def _text_in(arguments: str) -> str | None:
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return None
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else None
