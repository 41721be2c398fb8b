"""Reads `response_template` in tokenizer_config.json, transformers' description of answers.

Each field has the texts or regular expressions before and after its content, and the name of the
content's notation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from common.formats.derivation import family_of
from common.formats.family import Family
from common.formats.reading import Tags
from common.formats.shapes import FencedShape, JsonShape, PythonShape, Shape, TagShape

_REASONING = ("thinking", "reasoning", "reasoning_content")
_GROUP = re.compile(r"\(\?P<(\w+)>(?:[^()\\\[]|\\.|\[[^\]]*\])*\)[*+?]?")
_SPACE = re.compile(r"\\s[*+]|\s[*+]")
_ESCAPED = re.compile(r"\\(\W)")
_REGEX = re.compile(r"(?<!\\)[\[\]()*+?^$|.]|\\\w")


def described(template: Any) -> Family | None:
    """Return the family that a response template describes; None if it cannot be read here.

    Its shape is None if the notation of its calls is not known.
    """
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping):
        return None
    tags = []
    for name in _REASONING:
        opening, closing = _text(fields.get(name), "open"), _text(fields.get(name), "close")
        if opening and closing:
            tags.append(Tags(opening.rstrip("\n"), closing.strip("\n")))
    shape = _shape(fields.get("tool_calls"))
    family = family_of(shape, tuple(tags)) if shape else None
    if family is None and tags:
        family = Family("response template", tags=tuple(tags))
    return family


def _text(field: Any, end: str) -> str:
    """Return the text that opens or closes a field, with `{name}` for a group of that name.

    Returns '' if there is no such text.
    """
    if not isinstance(field, Mapping):
        return ""
    if isinstance(text := field.get(end), list):
        text = text[0] if text else ""
    if isinstance(text, str):
        return text
    pattern = field.get(f"{end}_pattern")
    if not isinstance(pattern, str):
        return ""
    return _without_regex(pattern)


def _without_regex(pattern: str) -> str:
    """Return the text, without space, that a simple regular expression matches; '' for others."""
    text = _SPACE.sub("", _GROUP.sub(lambda group: f"{{{group[1]}}}", pattern))
    return "" if _REGEX.search(text) else _ESCAPED.sub(r"\1", text)


def _shape(field: Any) -> Shape | None:
    opening, closing = _text(field, "open"), _text(field, "close")
    if not opening:
        return None
    arguments = field.get("content_args") or {}
    name, given = _places(field.get("transform"), each=field.get("transform_each") is True)
    match field.get("content"):
        case "json" if "{name}" in opening and arguments.get("string_delims"):
            fence = arguments["string_delims"][0][0]
            before = opening.partition("call:{name}")[0]
            return FencedShape(before, fence, closing) if before != opening else None
        case "json" if "{name}" in opening:
            return JsonShape(f"{opening}{{arguments}}{closing}", separator="")
        case "json" if name and given:
            call = f'{{"{name}": {{name}}, "{given}": {{arguments}}}}'
            if field.get("transform_each") is True:
                return JsonShape(call, f"{opening}[", closing=f"]{closing}")
            return JsonShape(f"{opening}{call}{closing}", separator="\n")
        case "xml-inline" if "{name}" in opening:
            return _tag_shape(opening, str(arguments.get("tag_pattern", "")), closing)
        case "python-call-list":
            return PythonShape(f"{opening.removesuffix('[')}[", ", ", f"]{closing.lstrip(']')}")
    return None


def _places(transform: Any, *, each: bool) -> tuple[str, str]:
    """Return the keys of a call's name and arguments in its JSON; '' if they are elsewhere."""
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if function == "{content}":
        return "name", "arguments"
    if not isinstance(function, Mapping):
        return "", ""
    prefix = "{" if each else "{content."
    found = [str(function.get(key, "")) for key in ("name", "arguments")]
    keys = [text[len(prefix) : -1] if text.startswith(prefix) else "" for text in found]
    return keys[0], keys[1]


def _tag_shape(opening: str, pattern: str, closing: str) -> TagShape | None:
    tag, value, value_end = _without_regex(pattern).partition("{value}")
    if not value or "{key}" not in tag:
        return None
    spaced = r"\s*(?P<value>" in pattern or r"\n(?P<value>" in pattern
    line = "\n" if spaced else ""
    block, _, call = opening.rpartition("<")
    end, _, block_end = closing.partition(">") if block else (closing, "", "")
    return TagShape(
        call=f"<{call}\n" if block else f"{opening}\n",
        parameter=f"{tag}{line}",
        value_end=f"{line}{value_end}\n",
        call_end=f"{end}>\n" if block else closing,
        opening=f"{block}\n" if block else "",
        closing=block_end.strip(),
        separator="\n",
        each=bool(block),
        lines="dropped" if spaced else "paired",
    )
