"""The roles of messages that a chat template does not know: replaced, or refused.

Hosts pass on whatever role a client sends. The templates of Qwen and others leave out messages of
roles that they do not know, so the model would answer as if these had not been sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from backend.engine.errors import InvalidRequest
from common.field_names import named
from common.wording import shown

_COMMON = frozenset({"system", "user", "assistant", "tool"})
_EQUIVALENT = {"developer": "system", "function": "tool"}


class Roles:
    """The roles that a chat template knows.

    template: the template's source, or several by name; None if it is written in Python.
    """

    def __init__(self, template: str | Mapping[str, str] | None) -> None:
        texts = template.values() if isinstance(template, Mapping) else [template or ""]
        self._source = "\n".join(texts)

    def replaced(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Return the messages, with OpenAI's newer or older name of a role replaced if unknown."""
        return tuple(
            message
            if self._knows(role := message["role"]) or role not in _EQUIVALENT
            else {**message, "role": _EQUIVALENT[role]}
            for message in messages
        )

    def require_shown(self, messages: Sequence[Mapping[str, Any]], prompt: str) -> None:
        """Raise InvalidRequest if the rendered prompt lacks a message because of its role."""
        for index, message in enumerate(messages):
            if self._knows(message["role"]):
                continue  # its template may quote the text, or read a setting from it
            if any(without_halves(text) not in prompt for text in _texts(message["content"])):
                raise InvalidRequest(
                    f"{named(f'Messages[{index}]')} has the role {shown(message['role'])}, which"
                    " the model's chat template leaves out: use system, user, assistant or tool"
                )

    def _knows(self, role: str) -> bool:
        return role in _COMMON or f"'{role}'" in self._source or f'"{role}"' in self._source


def shows_instructions(messages: Sequence[Mapping[str, Any]], prompt: str) -> bool:
    """Return whether a rendered prompt has all system messages after the first message.

    gpt-oss's template and others read only the first. Some change its text, so it is not compared.
    """
    later = (message["content"] for message in messages[1:] if message["role"] == "system")
    return all(text in prompt for content in later for text in _texts(content))


def _texts(content: Any) -> Iterator[str]:
    parts = content if isinstance(content, list) else [{"text": content}]
    yield from (str(part.get("text") or "").strip() for part in parts)


def without_halves(text: str) -> str:
    """Return the text with U+FFFD instead of each half of a surrogate pair.

    Agents send such halves if they cut a text in the middle of an emoji.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
