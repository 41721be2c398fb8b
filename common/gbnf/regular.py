"""Finds the rules of a grammar that are regular, so that a lexer can read them.

A rule is regular if it refers only to regular rules, or to itself only at the end of its
alternatives: `ws ::= ([ \\t\\n] ws)?` is `[ \\t\\n]*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter

from common.gbnf.syntax import (
    EMPTY,
    Choice,
    Expr,
    Reference,
    Repeat,
    Sequence,
    choice,
    references,
    sequence,
)


def reachable(rules: Mapping[str, Expr]) -> dict[str, Expr]:
    """Return the rules that `root` needs, in the order of their first use."""
    found: dict[str, Expr] = {}
    stack = ["root"]
    while stack:
        name = stack.pop()
        if name not in found:
            found[name] = rules[name]
            stack.extend(reversed([*references(rules[name])]))
    return found


def regular_rules(rules: Mapping[str, Expr]) -> dict[str, Expr]:
    """Return the regular rules in dependency order, without references to themselves."""
    needed = {name: set(references(expr)) - {name} for name, expr in rules.items()}
    order = TopologicalSorter(needed)
    with suppress(CycleError):  # the rules of a cycle never become ready
        order.prepare()
    found: dict[str, Expr] = {}
    while ready := order.get_ready():
        for name in ready:
            if (closed := _closed(name, rules[name])) is not None:
                found[name] = closed
                order.done(name)
    return found


class _NotAtEnd(Exception):
    """A rule refers to itself elsewhere than at the end."""


def _closed(name: str, expr: Expr) -> Expr | None:
    """Return the rule without references to itself; None if a reference is not at its end."""
    try:
        again, last = _split(name, expr)
    except _NotAtEnd:
        return None
    if not again:
        return expr
    return sequence(Repeat(choice(*again), 0, None), choice(*last)) if last else None


def _split(name: str, expr: Expr) -> tuple[list[Expr], list[Expr]]:
    """Return the parts before a final self-reference, and the alternatives without one."""
    if name not in references(expr):
        return [], [expr]
    match expr:
        case Reference():
            return [EMPTY], []
        case Choice(options):
            parts = [_split(name, option) for option in options]
            return [x for again, _ in parts for x in again], [x for _, last in parts for x in last]
        case Sequence((*before, end)) if not any(name in references(item) for item in before):
            again, last = _split(name, end)
            return [_ended(before, x) for x in again], [_ended(before, x) for x in last]
        case Repeat(item, 0, 1):
            again, last = _split(name, item)
            return again, [*last, EMPTY]
    raise _NotAtEnd


def _ended(before: list[Expr], last: Expr) -> Expr:
    return sequence(*before) if last == EMPTY else sequence(*before, last)
