"""The names of request fields in a message, marked so that each reader gets the names it knows.

A backend knows a field as `Tokens`, the author of a model file as `max_tokens`, and a client by the
name that it sent. So a message marks its fields, and the names are written when it is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# Control characters; `repr` escapes them, and `unmarked` removes them from other quotations.
_BEGIN, _END = "\x0e", "\x0f"
_NONE = dict.fromkeys((0x0E, 0x0F))
_WORD_BEGINS = re.compile("(?<=[a-z])(?=[A-Z])")
_PLACE = re.compile(r"\{([0-9]{1,3})\}|\{\{|\}\}")
_MARKED = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}")
_LOOSE = re.compile(f"{_BEGIN}(?![^{_BEGIN}{_END}]*{_END})")
_MARKED_OR_BRACE = re.compile(f"{_MARKED.pattern}|[{{}}]")


def named(name: str) -> str:
    """Return a field's name for use in a message."""
    return _BEGIN + unmarked(name) + _END


def unmarked(words: str) -> str:
    """Return the words of a client or a library so that they mark no field in a message."""
    return words.translate(_NONE)


def in_snake_case(name: str) -> str:
    """Return a name such as `FrequencyPenalty` as `frequency_penalty`."""
    return _WORD_BEGINS.sub("_", name).lower()


def fields_in(message: str) -> tuple[str, ...]:
    """Return the marked names, each once, in the order of the message."""
    return tuple(dict.fromkeys(_MARKED.findall(message)))


def renamed(message: str, name_of: Callable[[str], str]) -> str:
    """Return the message with other names for its fields, which stay marked."""
    return _MARKED.sub(lambda found: named(name_of(found[1])), message)


def written(message: str, name_of: Callable[[str], str] = str) -> str:
    """Return the message for a reader, with the names that `name_of` gives to its fields."""
    return _MARKED.sub(lambda found: name_of(found[1]), message)


def shortened(message: str, longest: int, fields: Sequence[str]) -> str:
    """Return at most `longest` characters of the message, in which only `fields` are marked."""
    cut = message if len(message) <= longest else f"{message[: longest - 1]}…"
    kept = _MARKED.sub(lambda found: found[0] if found[1] in fields else found[1], cut)
    return _LOOSE.sub("", kept)


def template_of(message: str, fields: Sequence[str]) -> str:
    """Return the message with `{0}` for the first of `fields`, and so on.

    Other braces are doubled.
    """

    def write(found: re.Match[str]) -> str:
        return 2 * found[0] if found[1] is None else f"{{{fields.index(found[1])}}}"

    return _MARKED_OR_BRACE.sub(write, message)


def from_template(template: str, fields: Sequence[str]) -> str:
    """Return the message of a template."""

    def read(found: re.Match[str]) -> str:
        place = int(found[1] or len(fields))
        return named(fields[place]) if place < len(fields) else found[0][0]

    return _PLACE.sub(read, template)


class BadField(ValueError):
    """A field with a wrong value; `message` marks its name, and `str()` does not."""

    def __init__(self, message: str) -> None:
        super().__init__(written(message))
        self.message = message
