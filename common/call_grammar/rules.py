"""Builds a Lark grammar, in which a model's special tokens are written as such."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ANY_TEXT = "/(?s:.*)/"
_TOKEN = re.compile(r"\\.|.", re.DOTALL)


def symbol(piece: str | int) -> str:
    """Return the id of a special token, or a text, as a Lark symbol."""
    return f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)


class SpecialTokens:
    """The special tokens of one model. Ordinary text in a grammar never matches them.

    ids: the ids of the special tokens, by text.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def pieces(self, text: str) -> list[str | int]:
        """Return a marker split into special tokens (as ids) and the text between them."""
        found: list[str | int] = []
        start = 0
        for match in self._pattern.finditer(text):
            found += [text[start : match.start()], self.ids[match.group()]]
            start = match.end()
        return [piece for piece in [*found, text[start:]] if piece != ""]

    def lark(self, text: str) -> str:
        """Return a marker as Lark symbols, for rules only: terminals cannot contain ids."""
        return " ".join(map(symbol, self.pieces(text)))

    def has(self, text: str) -> bool:
        """Return whether a text is a single special token of this model."""
        return text in self.ids


@dataclass
class RuleBook:
    """Rules by body, so equal ones are written once.

    json_options: llguidance's `x-guidance`.
    """

    markers: SpecialTokens
    json_options: Mapping[str, Any]
    lines: list[str] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)
    _reserved: dict[str, str] = field(default_factory=dict)

    def rule(self, body: str) -> str:
        return self._line("r", body)

    def terminal(self, body: str) -> str:
        return self._line("T", body)

    def reserve(self, key: str) -> tuple[str, bool]:
        """Return the name of the rule with this key, and whether it was reserved before.

        The body of a rule may contain the name; see `define`.
        """
        known = key in self._reserved
        if not known:
            self._reserved[key] = f"p{len(self.lines)}"
            self.lines.append("")
        return self._reserved[key], known

    def define(self, name: str, body: str) -> None:
        self.lines[int(name[1:])] = f"{name}: {body}"

    def text(self, marker: str) -> str:
        return self.markers.lark(marker)

    def json(self, schema: Mapping[str, Any], **options: Any) -> str:
        """Return a rule for a JSON value that matches the schema."""
        whole = {**schema, "x-guidance": {**self.json_options, **options}}
        return self.rule(f"%json {json.dumps(whole)}")

    def text_until(self, closing: str, without: Iterable[str], *also: str) -> str:
        """Return a rule for free text and the marker that closes it.

        Text and the beginning of the marker are one lexeme, so that the lexer cannot mistake one
        for the other.

        without: texts that it must not contain, besides the marker itself.
        also: terminals that it must match as well.
        """
        first, *rest = self.markers.pieces(closing)
        body = " & ".join([text_without([*without, closing.strip()]), *also])
        tail = map(symbol, rest)
        if isinstance(first, int):
            text = self.terminal(f"({body}) & /(?s:.+)/") + "?"
            if also:  # a terminal in `also` need not match the empty text
                text = self.terminal(body)
            return " ".join([text, symbol(first), *tail])
        text = self.terminal(f"({body}) {symbol(first)}")
        if not rest and closing.strip():
            # The text ends with its first marker. llguidance only notices that it cannot go on when
            # the next byte comes, and fails if a special token comes instead.
            text = self._line("r", text, "[lazy]")
        return " ".join([text, *tail])

    def written(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self.lines, ""])

    def _line(self, kind: str, body: str, attribute: str = "") -> str:
        key = f"{kind}{attribute} {body}"
        if key not in self._names:
            self._names[key] = f"{kind}{len(self.lines)}"
            self.lines.append(f"{self._names[key]}{attribute}: {body}")
        return self._names[key]


def either(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def separated(book: RuleBook, items: Sequence[tuple[str, bool]], separator: str) -> str:
    """Return a rule for items in order, with separators; those marked False are optional."""
    first, later = "", ""
    for item, required in reversed(items):
        follows = f"{separator} {item} {later}" if later else f"{separator} {item}"
        begins = f"{item} {later}" if later else item
        if required:
            first, later = book.rule(begins), book.rule(follows)
        else:
            first = book.rule(f"{begins} | {first}" if first else f'{begins} | ""')
            later = book.rule(f"{follows} | {later}" if later else f'{follows} | ""')
    return first or '""'


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
