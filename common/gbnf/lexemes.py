"""Converts a grammar to productions whose lexemes a greedy lexer reads correctly.

The lexer of llguidance always takes the longest lexeme and never backtracks. GBNF has no lexemes:
`[a-z]* "end"` matches `end`. So an expression may become a lexeme only if its next character always
shows where it continues or ends, as it does in JSON's strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from common.gbnf.edges import EdgesOf, meet
from common.gbnf.productions import Productions, successors
from common.gbnf.syntax import CharClass, Expr, Literal

_MAX_LEXEMES = 2000
_MAX_PAIRS = 300_000
"""Maximum number of pairs of lexemes that may be compared: about a second."""


class _TooLarge(Exception):
    """The grammar has too many lexemes to compare."""


def safe_productions(rules: Mapping[str, Expr], regular: Mapping[str, Expr]) -> Productions:
    """Return the grammar as productions whose lexemes a greedy lexer reads correctly."""
    edges, split = EdgesOf(regular), set[Expr]()
    if "root" in regular:
        return Productions(rules, regular, edges, lambda _: True)

    def lexable(expr: Expr) -> bool:
        return expr not in split and edges.of(expr).clear

    try:
        while True:
            productions = Productions(rules, regular, edges, lexable)
            clashing = _clashes(productions)
            if not clashing:
                return productions
            split |= {productions.lexemes[name] for name in clashing}
    except _TooLarge:
        return Productions(rules, regular, edges, _is_one_character)


def _clashes(productions: Productions) -> set[str]:
    """Return the lexemes that a greedy lexer may misread somewhere. Raises _TooLarge.

    Single characters are never among them, because several that match are read together.
    """
    lexemes, terminals = productions.lexemes, productions.terminals
    of = {name: productions.edges.of(expr) for name, expr in lexemes.items()}
    long = {name for name, expr in lexemes.items() if not _is_one_character(expr)}
    if len(lexemes) > _MAX_LEXEMES:
        raise _TooLarge
    start, following = successors(productions)
    pairs = sum(map(len, following.values()))
    if pairs > _MAX_PAIRS:
        raise _TooLarge
    found = {
        name for name in long if any(meet(of[name].onward, of[at].first) for at in following[name])
    }
    waiting = list(product(start, start))
    seen = set(waiting)
    while waiting:
        one, other = waiting.pop()
        if not meet(of[one].first, of[other].first):
            continue
        if terminals[one] != terminals[other] and not long.isdisjoint((one, other)):
            found |= long & {one, other}
            continue
        pairs += len(following[one]) * len(following[other])
        if pairs > _MAX_PAIRS:
            raise _TooLarge
        fresh = [pair for pair in product(following[one], following[other]) if pair not in seen]
        seen.update(fresh)
        waiting += fresh
    return found


def _is_one_character(expr: Expr) -> bool:
    return isinstance(expr, CharClass) or (isinstance(expr, Literal) and len(expr.text) == 1)
