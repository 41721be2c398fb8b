"""Parses GBNF as llama.cpp's `llama-grammar.cpp` does; errors name line and column.

Three forms that llama.cpp refuses are accepted, because hosts and people write them: a rule may
continue after a line break outside parentheses if no other rule begins there, names may contain
underscores, and rules may be left-recursive.
"""

from __future__ import annotations

import re

from common.gbnf.syntax import (
    ANY,
    LAST_CODE_POINT,
    CharClass,
    Expr,
    Literal,
    Reference,
    Repeat,
    choice,
    sequence,
)
from common.wording import shown

MAX_DEPTH = 100
MAX_REPEAT = 2000
"""Maximum of a counted repetition, as in llama.cpp."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_RULE_START = re.compile(r"[A-Za-z0-9_-]+[ \t]*::=")
_COUNTS = re.compile(r"\{[ \t]*([0-9]+)[ \t]*(,?)[ \t]*([0-9]*)[ \t]*\}")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}


class GbnfError(ValueError):
    """An error in a grammar, with its line and column, from 1."""

    def __init__(self, message: str, text: str, at: int) -> None:
        self.line = text.count("\n", 0, at) + 1
        self.column = at - (text.rfind("\n", 0, at) + 1) + 1
        super().__init__(f"line {self.line}, column {self.column}: {message}")


def parse(text: str) -> dict[str, Expr]:
    """Return the rules by name, with `root` and every referenced rule. Raises GbnfError."""
    return _Parser(text).rules()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._used: dict[str, int] = {}

    def rules(self) -> dict[str, Expr]:
        found: dict[str, Expr] = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._name("a rule's name")
            self._skip(_SPACE)
            if not self._text.startswith("::=", self._at):
                raise self._error(f"expected '::=' after {shown(name)}")
            self._at += 3
            self._skip(_SPACE_AND_LINES)
            found[name] = self._alternatives()
            if self._peek() not in ("", "\r", "\n"):
                raise self._error(f"unexpected {self._peek()!r}")
            self._skip(_SPACE_AND_LINES)
        for name, at in self._used.items():
            if name not in found:
                raise GbnfError(f"the rule {shown(name)} is not defined", self._text, at)
        if "root" not in found:
            raise GbnfError("there is no rule 'root'", self._text, 0)
        return found

    def _alternatives(self) -> Expr:
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            options.append(self._sequence())
        return choice(*options)

    def _sequence(self) -> Expr:
        items: list[Expr] = []
        self._space()
        while symbol := self._peek():
            if symbol in "*+?{":
                if not items:
                    raise self._error(f"there is nothing before {symbol!r} to repeat")
                items[-1] = self._repeat(items[-1], symbol)
            elif (item := self._item(symbol)) is not None:
                items.append(item)
            else:
                break
            self._space()
        return sequence(*items)

    def _item(self, symbol: str) -> Expr | None:
        if symbol == '"':
            return self._literal()
        if symbol == "[":
            return self._class()
        if symbol == "(":
            return self._group()
        if symbol == ".":
            self._at += 1
            return ANY
        if symbol in "<!":
            raise self._error("tokens in a grammar are not supported: write the token's text")
        if _NAME.match(symbol):
            at = self._at
            name = self._name("a name")
            self._used.setdefault(name, at)
            return Reference(name)
        return None

    def _group(self) -> Expr:
        start = self._at
        self._at += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        self._skip(_SPACE_AND_LINES)
        inside = self._alternatives()
        if self._peek() != ")":
            if self._at >= len(self._text):
                raise GbnfError("this '(' is never closed", self._text, start)
            raise self._error(f"expected ')' but found {self._peek()!r}")
        self._at += 1
        self._depth -= 1
        return inside

    def _literal(self) -> Expr:
        start = self._at
        self._at += 1
        characters: list[str] = []
        while self._character_comes('"', start, "literal"):
            at = self._at
            code = self._character()
            if 0xD800 <= code <= 0xDFFF:
                raise GbnfError("a surrogate is not a character", self._text, at)
            characters.append(chr(code))
        return Literal("".join(characters))

    def _class(self) -> Expr:
        start = self._at
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._character_comes("]", start, "class"):
            at = self._at
            low = high = self._character()
            if self._text.startswith("-", self._at) and self._text[self._at + 1 :][:1] != "]":
                self._at += 1
                high = self._character()
            if high < low:
                raise GbnfError("the range ends before it begins", self._text, at)
            ranges.append((low, high))
        if not ranges and not negated:
            raise GbnfError("an empty class matches nothing", self._text, start)
        return CharClass(tuple(ranges), negated)

    def _character_comes(self, end: str, start: int, what: str) -> bool:
        """Return whether another character of a literal or class follows; if not, consume `end`."""
        if self._at >= len(self._text):
            raise GbnfError(f"this {what} is never closed", self._text, start)
        if self._text[self._at] != end:
            return True
        self._at += 1
        return False

    def _character(self) -> int:
        if self._at >= len(self._text):
            raise self._error("unexpected end of the grammar")
        symbol = self._text[self._at]
        if symbol != "\\":
            self._at += 1
            return ord(symbol)
        kind = self._text[self._at + 1 : self._at + 2]
        if kind in _HEX_DIGITS:
            digits = self._text[self._at + 2 : self._at + 2 + _HEX_DIGITS[kind]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX_DIGITS[kind]}}}", digits):
                raise self._error(f"\\{kind} needs {_HEX_DIGITS[kind]} hexadecimal digits")
            code = int(digits, 16)
            if code > LAST_CODE_POINT:
                raise self._error(f"\\U{digits} is above the last character, \\U0010FFFF")
            self._at += 2 + len(digits)
            return code
        if kind not in _ESCAPES or not kind:
            raise self._error(f"unknown escape \\{kind}")
        self._at += 2
        return ord(_ESCAPES[kind])

    def _repeat(self, item: Expr, symbol: str) -> Expr:
        if symbol != "{":
            self._at += 1
            return Repeat(item, int(symbol == "+"), 1 if symbol == "?" else None)
        counts = _COUNTS.match(self._text, self._at)
        if not counts or (counts[3] and not counts[2]):
            raise self._error("expected {n}, {m,} or {m,n}")
        if max(len(counts[1].lstrip("0")), len(counts[3].lstrip("0"))) > len(str(MAX_REPEAT)):
            raise self._error(f"a repetition may have a count of at most {MAX_REPEAT}")
        least = int(counts[1])
        most = int(counts[3]) if counts[3] else None if counts[2] else least
        if max(least, most or 0) > MAX_REPEAT:
            raise self._error(f"a repetition may have a count of at most {MAX_REPEAT}")
        if most is not None and most < least:
            raise self._error(f"a repetition cannot have at least {least} and at most {most} items")
        self._at = counts.end()
        return Repeat(item, least, most)

    def _name(self, what: str) -> str:
        found = _NAME.match(self._text, self._at)
        if not found:
            raise self._error(f"expected {what}, but found {self._peek()!r}")
        self._at = found.end()
        return found.group()

    def _space(self) -> None:
        """Skip spaces, and line breaks after which the same rule continues."""
        self._skip(_SPACE)
        if self._peek() not in ("\r", "\n") or self._at >= len(self._text):
            return
        lines = _SPACE_AND_LINES.match(self._text, self._at)
        after = lines.end() if lines else self._at
        if self._depth or (after < len(self._text) and not _RULE_START.match(self._text, after)):
            self._at = after

    def _skip(self, pattern: re.Pattern[str]) -> None:
        if found := pattern.match(self._text, self._at):
            self._at = found.end()

    def _peek(self) -> str:
        """Return the next character; '' at the end."""
        return self._text[self._at : self._at + 1]

    def _error(self, message: str) -> GbnfError:
        return GbnfError(message, self._text, self._at)
