"""Defines the elements of a parsed GBNF grammar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # of code points; ends are inclusive


@dataclass(frozen=True, slots=True)
class Literal:
    """A literal string."""

    text: str


@dataclass(frozen=True, slots=True)
class CharClass:
    """One character in (or with `negated` outside) ranges of code points."""

    ranges: Ranges
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """Another rule, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Items in sequence; empty for the empty text."""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several alternatives."""

    options: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """An item from `least` to `most` times; None means unlimited."""

    item: Expr
    least: int
    most: int | None


Expr: TypeAlias = Literal | CharClass | Reference | Sequence | Choice | Repeat

ANY = CharClass((), negated=True)
EMPTY = Sequence(())
LAST_CODE_POINT = 0x10FFFF


def sequence(*items: Expr) -> Expr:
    return items[0] if len(items) == 1 else Sequence(tuple(items))


def choice(*options: Expr) -> Expr:
    return options[0] if len(options) == 1 else Choice(tuple(options))


def references(expr: Expr) -> Iterator[str]:
    """Yield the names of the rules that an expression refers to, in order, with repetitions."""
    stack = [expr]
    while stack:
        match stack.pop():
            case Reference(name):
                yield name
            case Sequence(parts) | Choice(parts):
                stack.extend(reversed(parts))
            case Repeat(item):
                stack.append(item)


def ranges_of(characters: CharClass) -> Ranges:
    """Return the code points of a class as sorted ranges without overlaps and surrogates."""
    if not characters.negated:
        return merged(characters.ranges)
    found, start = [], 0
    for low, high in merged(characters.ranges):
        if low > start:
            found.append((start, low - 1))
        start = high + 1
    if start <= LAST_CODE_POINT:
        found.append((start, LAST_CODE_POINT))
    return merged(found)


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in order, without overlaps and surrogates."""
    whole: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        for part in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
            if part[0] > part[1]:
                continue
            if whole and part[0] <= whole[-1][1] + 1:
                whole[-1] = (whole[-1][0], max(whole[-1][1], part[1]))
            else:
                whole.append(part)
    return tuple(whole)
