"""Quotes the strings in messages that a tokenizer would read as control tokens.

A user who writes `<|im_end|>` in a question must not end the message with this string: in messages
of users and tools, it is ordinary text. So before the chat template renders a message, a mark is
inserted into such strings: a character that occurs in no text. The mark distinguishes quoted text
from text that the template writes. `backend.engine.prompting.quoted_text` removes the marks, and
tokenises the two kinds of text differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from backend.engine.errors import InvalidRequest

# Unicode's noncharacters, which are for internal use by programs and never occur in text.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_TRUSTED = frozenset({"system", "developer", "assistant"})
_MARKUP = re.compile(r"[<\[].*[>\]]", re.DOTALL)
# Gemma has added tokens for these HTML tags, which control nothing.
_HTML = re.compile(
    r"</?(a|b|blockquote|caption|code|em|h[1-6]|i|img|li|ol|p|s|strike|strong|sub|sup|table|tbody"
    r"|td|tfoot|th|thead|tr|u|ul)>"
)


@dataclass(frozen=True, slots=True)
class Quoted:
    """Messages whose control strings contain `mark`, which is '' if they have no such strings."""

    messages: tuple[Mapping[str, Any], ...]
    mark: str


class ControlTokens:
    """The control strings of a tokenizer.

    added: the tokenizer's added tokens by id (tokenizers.AddedToken). Special tokens are control
        strings, and so are other tokens that look like markup. Words and runs of spaces are not.
    tokens: the added tokens by control string.
    ids: the token ids by control string.
    """

    def __init__(self, added: Mapping[int, Any]) -> None:
        self.tokens: dict[str, Any] = {
            str(token.content): token for token in added.values() if _controls(token)
        }
        self.ids = {
            str(added[number].content): number for number in added if _controls(added[number])
        }
        starts = (f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in self.tokens)
        self._starts = re.compile("|".join(starts)) if self.tokens else None

    def quote(self, messages: tuple[Mapping[str, Any], ...]) -> Quoted:
        """Insert a mark into control strings that users and tools have written.

        Raises InvalidRequest.
        """
        starts = self._starts
        foreign = [message for message in messages if message.get("role") not in _TRUSTED]
        if starts is None or not any(starts.search(text) for text in _texts(foreign)):
            return Quoted(messages, "")
        texts = list(_texts(messages))
        mark = next((mark for mark in _MARKS if not any(mark in text for text in texts)), None)
        if mark is None:
            raise InvalidRequest(
                "Messages quote a control token of the model and contain all characters from U+FDD0"
                " to U+FDEF, which Unicode keeps out of text: remove one of them"
            )
        quoted = tuple(
            message
            if message.get("role") in _TRUSTED
            else _mapped(message, lambda text: starts.sub(lambda found: found[0] + mark, text))
            for message in messages
        )
        return Quoted(quoted, mark)

    def written(self, mark: str) -> re.Pattern[str]:
        """Return a pattern that matches the longest control string that no `mark` follows."""
        longest = sorted(self.tokens, key=len, reverse=True)
        return re.compile(f"(?:{'|'.join(map(re.escape, longest))})(?!{mark})")


def _controls(token: Any) -> bool:
    text = str(token.content)
    if not text.strip("\u2581 \t\r\n"):
        return False
    return bool(token.special or (_MARKUP.fullmatch(text) and not _HTML.fullmatch(text)))


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(inner, change) for inner in value]
    return value
