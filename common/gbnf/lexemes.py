"""Checks whether a greedy lexer distinguishes two expressions that may begin at the same position.

The lexer of llguidance always takes the longest lexeme and never backtracks. GBNF has no lexemes:
`[a-z]* "end"` matches `end`. So an expression may become a lexeme only if the longest match is
always right. `encounter` determines this from the positions of the expressions (Glushkov's
automaton), without the product of their states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from common.gbnf.syntax import (
    CharClass,
    Choice,
    Expr,
    Literal,
    Reference,
    Repeat,
    Sequence,
    ranges_of,
)

Ranges = tuple[tuple[int, int], ...]
MAX_POSITIONS = 4000


class TooLarge(Exception):
    """The expressions are too large to analyse."""


@dataclass(slots=True)
class _Part:
    nullable: bool
    first: set[int]
    last: set[int]


@dataclass
class Lexeme:
    """A regular expression as positions: each matches one character and leads to other positions.

    Limited repetitions count as unlimited ones, which can only lead to more clashes.
    """

    chars: list[Ranges] = field(default_factory=list)
    follow: list[set[int]] = field(default_factory=list)
    nullable: bool = False
    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, expr: Expr, regular: Mapping[str, Expr]) -> Lexeme:
        """Return the lexeme of a regular expression. Raises TooLarge."""
        lexeme = cls()
        part = lexeme._build(expr, regular)
        lexeme.nullable, lexeme.first, lexeme.last = part.nullable, part.first, part.last
        return lexeme

    @cached_property
    def beginnings(self) -> Ranges:
        """The characters with which a matching text may begin."""
        return tuple(r for at in self.first for r in self.chars[at])

    def _position(self, ranges: Ranges) -> _Part:
        if len(self.chars) >= MAX_POSITIONS:
            raise TooLarge
        self.chars.append(ranges)
        self.follow.append(set())
        at = len(self.chars) - 1
        return _Part(False, {at}, {at})

    def _build(self, expr: Expr, regular: Mapping[str, Expr]) -> _Part:
        match expr:
            case Literal(text):
                return self._chain([self._position(((ord(c), ord(c)),)) for c in text])
            case CharClass():
                return self._position(ranges_of(expr))
            case Reference(name):
                return self._build(regular[name], regular)
            case Sequence(items):
                return self._chain([self._build(item, regular) for item in items])
            case Choice(options):
                parts = [self._build(option, regular) for option in options]
                return _Part(
                    any(p.nullable for p in parts),
                    {at for p in parts for at in p.first},
                    {at for p in parts for at in p.last},
                )
            case Repeat(item, least, most):
                part = self._build(item, regular)
                if most is None or most > 1:
                    for at in part.last:
                        self.follow[at] |= part.first
                return _Part(part.nullable or least == 0, part.first, part.last)
        raise AssertionError(expr)

    def _chain(self, parts: list[_Part]) -> _Part:
        whole = _Part(True, set(), set())
        for part in parts:
            for at in whole.last:
                self.follow[at] |= part.first
            whole = _Part(
                whole.nullable and part.nullable,
                whole.first | part.first if whole.nullable else whole.first,
                whole.last | part.last if part.nullable else part.last,
            )
        return whole


def meet(one: Ranges, other: Ranges) -> bool:
    """Return whether the ranges have a character in common."""
    return any(a <= d and c <= b for a, b in one for c, d in other)


@dataclass(frozen=True, slots=True)
class Encounter:
    """How two lexemes that begin at the same position overlap.

    equal: whether a text can match both.
    onward: the characters with which the second can continue when the first is complete.
    """

    equal: bool
    onward: Ranges


def encounter(one: Lexeme, other: Lexeme, budget: list[int]) -> Encounter:
    """Return how two lexemes overlap, by the texts that begin both.

    budget: one number, the steps that remain; each pair of positions takes one. Raises TooLarge if
        none is left.
    """
    stack = [(p, q) for p in one.first for q in other.first]
    seen = set(stack)
    equal = False
    onward: set[tuple[int, int]] = set()
    met: list[tuple[int, int]] = []
    while stack:
        p, q = stack.pop()
        budget[0] -= 1
        if budget[0] < 0:
            raise TooLarge
        if not meet(one.chars[p], other.chars[q]):
            continue
        met.append((p, q))
        if p in one.last:
            equal = equal or q in other.last
            for successor in other.follow[q]:
                onward.update(other.chars[successor])
        for pair in ((a, b) for a in one.follow[p] for b in other.follow[q]):
            if pair not in seen:
                seen.add(pair)
                stack.append(pair)
    return Encounter(equal, tuple(onward))
