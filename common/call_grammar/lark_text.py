"""Writes the parts of a Lark grammar (llguidance's) that match free text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

ANY_TEXT = "/(?s:.*)/"


def regex_text(text: str) -> str:
    """Return a regular expression that matches only this text, safe between slashes."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def text_without(forbidden: Iterable[str]) -> str:
    """Return the body of a terminal that matches any text, or none, without these substrings."""
    listed = "|".join(regex_text(text) for text in dict.fromkeys(forbidden) if text)
    # A single expression, because llguidance's lexer grows with every negation.
    return f"({ANY_TEXT} & ~/(?s:.*)({listed})(?s:.*)/)" if listed else ANY_TEXT


def literals_of(option: Mapping[str, Any]) -> list[str] | None:
    """Return the strings that a schema alternative lists; None if it lists none."""
    values = option.get("enum", [option["const"]] if "const" in option else None)
    if not isinstance(values, list):
        return None
    return [value for value in values if isinstance(value, str)]


def shape_of(option: Mapping[str, Any]) -> str:
    """Return a string schema's constraints as the body of a terminal; without any, '/(?s:.*)/'."""
    if (values := literals_of(option)) is not None:
        return f"/({'|'.join(map(regex_text, values))})/"
    parts = []
    if "minLength" in option or "maxLength" in option:
        parts.append(f"/(?s:.{{{option.get('minLength', 0)},{option.get('maxLength', '')}}})/")
    if "pattern" in option:
        parts.append(f"/{'|'.join(map(_whole, _branches(str(option['pattern']))))}/")
    return f"({' & '.join(parts)})" if parts else ANY_TEXT


_TOKEN = re.compile(r"\\.|.", re.DOTALL)


def _branches(pattern: str) -> list[list[str]]:
    """Return the alternatives of a regular expression, as tokens that are safe between slashes."""
    branches: list[list[str]] = [[]]
    depth, listed = 0, False  # depth of groups, and whether inside a class
    for token in _TOKEN.findall(pattern):
        if listed:
            listed = token != "]"
        elif token == "[":
            listed = True
        elif token in "()":
            depth += 1 if token == "(" else -1
        elif token == "|" and not depth:
            branches.append([])
            continue
        branches[-1].append("\\/" if token == "/" else token)
    return branches


def _whole(branch: list[str]) -> str:
    """Return an expression for a whole text with a match, because schemas' patterns search."""
    before = branch[:1] != ["^"]
    after = branch[-1:] != ["$"]
    core = "".join(branch[0 if before else 1 : None if after else -1])
    return f"{'(?s:.*)' if before else ''}({core}){'(?s:.*)' if after else ''}"
