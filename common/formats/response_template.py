"""Reads `response_template` in tokenizer_config.json, transformers' description of answers.

Each field has the texts or regular expressions before and after its content, and the name of the
content's notation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from re import _parser  # type: ignore[attr-defined]  # nothing else parses expressions
from typing import Any

from common.formats.derivation import family_of
from common.formats.family import Family
from common.formats.reading import Tags
from common.formats.shapes import FencedShape, JsonShape, PythonShape, Shape, TagShape

_REASONING = ("thinking", "reasoning", "reasoning_content")
_TAG, _WORD = re.compile(r"<[^<>]*>"), re.compile(r"[\w:-]+")
_FREE = frozenset({"ASSERT", "ASSERT_NOT", "AT"})
_REPEATS = frozenset({"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"})


def described(template: Any) -> Family | None:
    """Return the family that a response template describes; None if it cannot be read here.

    Its shape is None if the notation of its calls is not known.
    """
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping):
        return None
    tags = tuple(
        Tags(opening.rstrip("\n"), closing.strip("\n"))
        for name in _REASONING
        for opening, closing in product(
            _texts(fields.get(name), "open"), _texts(fields.get(name), "close")
        )
        if opening and closing
    )
    shape = _shape(fields.get("tool_calls"))
    content = fields.get("content")
    answers, silent = (
        tuple(filter(None, (text.strip() for text in _texts(content, end))))
        for end in ("open", "close")
    )
    family = family_of(shape, tags, answers, silent) if shape else None
    if family is None and (tags or answers):
        family = Family("response template", tags=tags, answers=answers, silent=silent)
    return family


def _texts(field: Any, end: str) -> list[str]:
    """Return the texts that open or close a field, with `{name}` for a group of that name."""
    if not isinstance(field, Mapping):
        return []
    texts, pattern = field.get(end), field.get(f"{end}_pattern")
    if isinstance(texts, list):
        return [text for text in texts if isinstance(text, str)]
    if isinstance(texts, str):
        return [texts]
    return [_text_of(pattern)] if isinstance(pattern, str) else []


def _text(field: Any, end: str) -> str:
    """Return the first of these texts; '' if there is none."""
    return next(iter(_texts(field, end)), "")


def _text_of(pattern: str) -> str:
    """Return a text that a regular expression matches, with `{name}` for its groups with names.

    It has nothing of what is optional, but a line break for any space. Returns '' if it cannot be
    known what the model writes.
    """
    try:
        parsed = _parser.parse(pattern)
        names = {number: name for name, number in parsed.state.groupdict.items()}
        return "".join(_written(item, names) for item in parsed)
    except (re.error, ValueError, RecursionError):
        return ""


def _written(item: tuple[Any, Any], names: Mapping[int, str]) -> str:
    """Return the text for an item of a parsed expression. Raises ValueError."""
    kind, value = str(item[0]), item[1]
    if kind == "LITERAL":
        return chr(value)
    if kind in _FREE:
        return ""
    if kind == "IN" and all(str(each[1]) == "CATEGORY_SPACE" for each in value):
        return "\n"
    if kind == "GROUPREF" and value in names:
        return f"{{{names[value]}}}"
    if kind == "SUBPATTERN" and value[0] in names:
        return f"{{{names[value[0]]}}}"
    if kind in _REPEATS:
        inside = "".join(_written(each, names) for each in value[2]) if value[0] else ""
        space = len(value[2]) == 1 and "CATEGORY_SPACE" in str(value[2])
        return "\n" if space else inside * value[0]
    if kind == "SUBPATTERN":
        return "".join(_written(each, names) for each in value[3])
    if kind == "BRANCH":
        return "".join(_written(each, names) for each in value[1][0])
    raise ValueError(f"no text is known for {kind}")


def _shape(field: Any) -> Shape | None:
    opening, closing = _text(field, "open"), _text(field, "close").strip()
    if not opening:
        return None
    arguments = field.get("content_args") or {}
    as_json = (arguments.get("value_parser") or {}).get("name") == "json"
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
            shape = _tag_shape(opening, str(arguments.get("tag_pattern", "")), closing)
            return replace(shape, undeclared="guess" if as_json else "text") if shape else None
        case "kv-lines" if "{name}" in opening and arguments.get("line_sep", "\n") == "\n":
            return TagShape(
                call=f"{opening.strip()}\n",
                parameter=f"{{key}}{arguments.get('kv_sep', ':')}",
                value_end="\n",
                call_end=closing,
                separator="\n",
                undeclared="json" if as_json else "text",
            )
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
    tag, value, value_end = _text_of(pattern).partition("{value}")
    if not value or "{key}" not in tag:
        return None
    if "<" not in tag:  # attributes
        return TagShape(opening, f" {tag.strip()}", value_end, closing, separator="\n")
    opening = opening.strip()
    block, _, call = opening.rpartition("<")
    block = block.strip() if "{name}" in call else ""
    ends = _TAG.findall(closing) if block else [closing]
    if block and len(ends) == 1 and (word := _WORD.match(call)):
        ends.insert(0, f"</{word[0]}>")
    return TagShape(
        call=f"<{call}\n" if block else f"{opening}\n",
        parameter=tag.lstrip(),
        value_end=f"{value_end.rstrip()}\n",
        call_end=f"{ends[0]}\n" if block else closing,
        opening=f"{block}\n" if block else "",
        closing="".join(ends[1:]),
        separator="\n",
        each=bool(block),
        lines="dropped" if tag.endswith("\n") else "paired",
    )
