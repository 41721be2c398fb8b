"""Marks the names of request fields in messages, so that they can be replaced for each reader.

The same field is `Tokens` in a backend, `max_tokens` in a model file, and has another name again in
a client's request. So a message is created with marked field names, and the names that the reader
knows are inserted when the message is sent.
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
    """Return a field's name with marks, for use in a message."""
    return _BEGIN + unmarked(name) + _END


def unmarked(words: str) -> str:
    """Return a text of a client or a library without characters that mark fields."""
    return words.translate(_NONE)


# By field of ModelOptions: its key in model files, where that is not the name in snake case.
MODEL_KEYS = {
    "DType": "dtype",
    "CacheTypeKey": "cache_type_k",
    "CacheTypeValue": "cache_type_v",
    "MMProj": "mmproj",
}


def in_snake_case(name: str) -> str:
    """Return a name such as `FrequencyPenalty` as `frequency_penalty`."""
    return _WORD_BEGINS.sub("_", name).lower()


def fields_in(message: str) -> tuple[str, ...]:
    """Return the marked names, each once, in the order of the message."""
    return tuple(dict.fromkeys(_MARKED.findall(message)))


def renamed(message: str, name_of: Callable[[str], str]) -> str:
    """Return the message with each field name replaced by `name_of(name)`, still marked."""
    return _MARKED.sub(lambda found: named(name_of(found[1])), message)


def written(message: str, name_of: Callable[[str], str] = str) -> str:
    """Return the message for a reader, with each field name replaced by `name_of(name)`."""
    return _MARKED.sub(lambda found: name_of(found[1]), message)


def shortened(message: str, longest: int, fields: Sequence[str]) -> str:
    """Return the message, cut to at most `longest` characters.

    Of the field names in the result, only those in `fields` are marked.
    """
    cut = message if len(message) <= longest else f"{message[: longest - 1]}…"
    kept = _MARKED.sub(lambda found: found[0] if found[1] in fields else found[1], cut)
    return _LOOSE.sub("", kept)


def template_of(message: str, fields: Sequence[str]) -> str:
    """Return the message as a format string, with `{0}` for the first of `fields`, and so on."""

    def write(found: re.Match[str]) -> str:
        return 2 * found[0] if found[1] is None else f"{{{fields.index(found[1])}}}"

    return _MARKED_OR_BRACE.sub(write, message)


def from_template(template: str, fields: Sequence[str]) -> str:
    """Return the message with marked field names, from the result of `template_of`."""

    def read(found: re.Match[str]) -> str:
        place = int(found[1] or len(fields))
        return named(fields[place]) if place < len(fields) else found[0][0]

    return _PLACE.sub(read, template)
