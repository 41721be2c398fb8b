"""Finds the characters at the edges of regular expressions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

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


@dataclass(frozen=True, slots=True)
class Edges:
    """How a text of a regular expression begins and ends."""

    nullable: bool  # whether the expression matches the empty text
    first: Ranges = ()  # the characters with which a text may begin
    onward: Ranges = ()  # the characters with which a text may continue when it is complete
    # Whether each character of a text can be read in one way only, given the text before it.
    clear: bool = True


class EdgesOf:
    """Computes the edges of expressions.

    regular: the regular rules of a grammar, in dependency order.
    """

    def __init__(self, regular: Mapping[str, Expr]) -> None:
        self._rules: dict[str, Edges] = {}
        for name, expr in regular.items():
            self._rules[name] = self.of(expr)

    def of(self, expr: Expr) -> Edges:
        match expr:
            case Literal(text):
                return Edges(not text, tuple((ord(c), ord(c)) for c in text[:1]))
            case CharClass():
                return Edges(False, ranges_of(expr))
            case Reference(name):
                return self._rules[name]
            case Sequence(items):
                return reduce(_followed, map(self.of, items), Edges(True))
            case Choice(options):
                return reduce(_either, map(self.of, options), Edges(False))
            case Repeat(item, least, most):
                part = self.of(item)
                nullable = part.nullable or least == 0
                if most == 1:
                    return Edges(nullable, part.first, part.onward, part.clear)
                # A limited repetition counts as an unlimited one, which is less often clear.
                clear = _followed(part, part).clear
                return Edges(nullable, part.first, merged((*part.onward, *part.first)), clear)
        raise AssertionError(expr)


def _followed(one: Edges, other: Edges) -> Edges:
    first, onward = one.first, other.onward
    clear = one.clear and other.clear and not meet(one.onward, other.first)
    if one.nullable:
        clear = clear and not meet(one.first, other.first)
        first = merged((*one.first, *other.first))
    if other.nullable:
        onward = merged((*one.onward, *other.first, *other.onward))
    return Edges(one.nullable and other.nullable, first, onward, clear)


def _either(one: Edges, other: Edges) -> Edges:
    return Edges(
        one.nullable or other.nullable,
        merged((*one.first, *other.first)),
        merged((*one.onward, *other.onward)),
        one.clear and other.clear and not meet(one.first, other.first),
    )


def meet(one: Ranges, other: Ranges) -> bool:
    """Return whether the ranges have a character in common."""
    return any(a <= d and c <= b for a, b in one for c, d in other)
