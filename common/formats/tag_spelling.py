"""The tags of calls: their attributes, and the other ways in which models write them."""

from __future__ import annotations

import re
from functools import cache

_BARE = re.compile(r"""(?:\s*[=:]\s*|\s+)(?:"([^"]*)"|'([^']*)'|["']?([^"'=]*)["']?)""")
"""A name or a key that is not in an attribute, as in `<function=NAME>`."""
_ATTRIBUTE = re.compile(
    r"""([\w-]+)\s*=\s*("(?:[^"]|"(?!\s*/?$|\s+[\w-]+\s*=))*"|'[^']*'|[^\s"'/>]+)"""
)

_TOKEN = re.compile(r"(<[|｜]|\]<\])([^<>]*[^<>|｜\[])([|｜]>|\[>\[)|<[^<>]*>?")
"""A token of the vocabulary, or the tag of an element."""
_CONFUSED = (
    *("<{}|>", "<|{}|>", "<|/{}|>", "</{}|>", "</|{}|>"),
    *("<|{}>", "<|/{}>", "/{}>", "{}>"),
)


def attributes_of(header: str, key: str) -> dict[str, str]:
    """Return the attributes of a tag, without quotes, with the two escapes of templates decoded.

    Text that is no attribute has this key. There are none if the header contains anything else;
    then it is not a tag of the family.
    """
    if bare := _BARE.fullmatch(header.rstrip()):
        text = (bare[1] or bare[2] or bare[3] or "").strip()
        return {key: text} if text else {}
    if _ATTRIBUTE.sub("", header).strip():
        return {}
    return {
        key: (value[1:-1] if value[0] in "\"'" else value)
        .replace("&quot;", '"')
        .replace("&amp;", "&")
        for key, value in _ATTRIBUTE.findall(header)
    }


def respelt(tag: str) -> tuple[str, ...]:
    """Return a closing tag, and how models write it if they confuse its brackets."""
    before, _, last = tag.rpartition("<")
    word = last.strip(">/|")
    return (tag, *(before + form.format(word) for form in _CONFUSED)) if word else ()


def closings(tag: str) -> tuple[str, ...]:
    """Return a closing tag, and every other way in which models write it."""
    return tuple(dict.fromkeys((*openings(tag), *respelt(tag)))) if tag else ()


@cache
def openings(tag: str) -> tuple[str, ...]:
    """Return a tag, and its forms after one of its tokens has lost brackets.

    A token before others may be lost entirely, if the rest is not the tag of another family.
    """
    if tag.startswith("[") and tag.endswith("]"):
        return (tag, tag[1:], tag[:-1])
    found = [tag, tag.removesuffix(">")]
    for token in _TOKEN.finditer(tag):
        before, rest = tag[: token.start()], tag[token.end() :]
        first, word, last = token.groups()
        begun = [token[0][:-1] if word else token[0].removesuffix(">"), token[0][1:]]
        if word:
            begun += [first + word, f"{first}{word}>", word + last, f"<{word}{last}"]
            begun += [""] if rest and not re.match(r"<\w", rest) else []
        found += [before + form + rest for form in begun]
    return tuple(dict.fromkeys(found))


def spellings(tag: str) -> tuple[str, ...]:
    """Return the beginning of a tag, and the other forms in which models write it."""
    stem = tag.removesuffix("=")
    before, _, word = tag.rpartition("<")
    if stem != tag:
        return (tag, f"{stem} name=", f"{stem} =", f"{stem}: ")
    return (tag, f"{before}{word}") if before else (tag,)
