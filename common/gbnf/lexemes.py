"""Decides which expressions a greedy lexer reads correctly, so that they may become lexemes.

The lexer of llguidance always takes the longest lexeme and never backtracks. GBNF has no lexemes:
`[a-z]* "end"` matches `end`. So an expression may become a lexeme only if its next character always
shows where it continues or ends. For example, that is true of JSON's strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from common.gbnf.productions import Productions, successors
from common.gbnf.syntax import (
    CharClass,
    Choice,
    Expr,
    Literal,
    Ranges,
    Reference,
    Repeat,
    Sequence,
    merged,
    ranges_of,
)

_MAX_PAIRS = 100_000
"""Maximum number of pairs of lexemes that are compared: about a second."""


class TooLarge(Exception):
    """The grammar has too many lexemes to compare."""


@dataclass(frozen=True, slots=True)
class Edges:
    """The characters at the edges of an expression that is read without looking ahead.

    nullable: whether the expression matches the empty text.
    first: the characters with which the expression may begin.
    onward: the characters with which the expression may continue when it is complete.
    """

    nullable: bool
    first: Ranges = ()
    onward: Ranges = ()


class EdgesByRule:
    """The edges of expressions.

    regular: the regular rules of a grammar, in dependency order.
    """

    def __init__(self, regular: Mapping[str, Expr]) -> None:
        self._rules: dict[str, Edges | None] = {}
        for name, expr in regular.items():
            self._rules[name] = self.of(expr)

    def of(self, expr: Expr) -> Edges | None:
        """Return the edges of a regular expression; None if a character may be read in two ways."""
        match expr:
            case Literal(text):
                return Edges(not text, tuple((ord(c), ord(c)) for c in text[:1]))
            case CharClass():
                return Edges(False, ranges_of(expr))
            case Reference(name):
                return self._rules[name]
            case Sequence(items):
                whole: Edges | None = Edges(True)
                for item in items:
                    whole = _followed(whole, self.of(item))
                return whole
            case Choice(options):
                return _either([self.of(option) for option in options])
            case Repeat(item, least, most):
                part = self.of(item)
                again = part if most == 1 else _followed(part, part)
                if part is None or again is None:
                    return None
                onward = part.onward if most == 1 else merged((*part.onward, *part.first))
                return Edges(part.nullable or least == 0, part.first, onward)
        raise AssertionError(expr)


def _followed(one: Edges | None, other: Edges | None) -> Edges | None:
    if one is None or other is None or meet(one.onward, other.first):
        return None
    if one.nullable and one is not other and meet(one.first, other.first):
        return None
    first = merged((*one.first, *other.first)) if one.nullable else one.first
    before = (*one.onward, *other.first) if other.nullable else ()
    return Edges(one.nullable and other.nullable, first, merged((*before, *other.onward)))


def _either(parts: Iterable[Edges | None]) -> Edges | None:
    whole: Edges | None = None
    for part in parts:
        if part is None or (whole and meet(whole.first, part.first)):
            return None
        whole = whole or Edges(False)
        whole = Edges(
            whole.nullable or part.nullable,
            merged((*whole.first, *part.first)),
            merged((*whole.onward, *part.onward)),
        )
    return whole


def meet(one: Ranges, other: Ranges) -> bool:
    """Return whether the ranges have a character in common."""
    return any(a <= d and c <= b for a, b in one for c, d in other)


def clashes(productions: Productions, edges: EdgesByRule) -> set[str]:
    """Return the lexemes that a greedy lexer may misread somewhere. Raises TooLarge.

    Single characters are never among them, because several that match are read together.
    """
    lexemes = productions.lexemes
    of = {name: edges.of(expr) or Edges(False) for name, expr in lexemes.items()}
    long = {name for name, expr in lexemes.items() if not is_one_character(expr)}
    start, following = successors(productions)
    found = {
        name for name in long if any(meet(of[name].onward, of[at].first) for at in following[name])
    }
    waiting = list(product(start, start))
    seen = set(waiting)
    while waiting:
        one, other = waiting.pop()
        if not meet(of[one].first, of[other].first):
            continue
        if one != other and not long.isdisjoint((one, other)):
            found |= long & {one, other}
            continue
        fresh = [pair for pair in product(following[one], following[other]) if pair not in seen]
        seen.update(fresh)
        waiting += fresh
        if len(seen) > _MAX_PAIRS:
            raise TooLarge
    return found


def is_one_character(expr: Expr) -> bool:
    return isinstance(expr, CharClass) or (isinstance(expr, Literal) and len(expr.text) == 1)
