"""Recognises a family by the markers in a chat template, or by the tokens in a vocabulary.

The template is examined first: a fine-tuned model keeps the vocabulary of its base model, but the
template shows what it was trained on. Of the families whose signs are all present, the one with the
longest signs is the most specific.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from common.formats.families import FAMILIES
from common.formats.harmony import Harmony
from common.formats.reading import Tags

_SIGNS = sorted(
    ((signs, family.names.split()[0]) for family in FAMILIES for signs in family.signs),
    key=lambda each: -sum(map(len, each[0])),
)
_MARKUP = re.compile(r"[<\[][^\n]*[>\]]")
_TAGS: dict[tuple[str, str], Tags] = {}
for _family in FAMILIES:
    for _tags in _family.tags:
        if _MARKUP.fullmatch(_tags.closing) and not isinstance(_family.grammar, Harmony):
            _TAGS.setdefault((_tags.opening, _tags.closing), _tags)


def tool_parser(chat_template: str, vocabulary: Collection[str]) -> str:
    """Return the name of the tool parser whose markers are present; `plain` if there are none."""
    has: Callable[[str], bool]
    for has in (chat_template.__contains__, frozenset(vocabulary).__contains__):
        for signs, name in _SIGNS:
            if all(map(has, signs)):
                return name
    return "plain"


def reasoning_tags(chat_template: str, vocabulary: Collection[str]) -> tuple[Tags, ...]:
    """Return the reasoning tags that the template contains, or that are tokens."""
    return tuple(
        tags
        for tags in _TAGS.values()
        if tags.closing in chat_template
        or (tags.opening in vocabulary and tags.closing in vocabulary)
    )
