"""Converts a GBNF grammar to Lark for llguidance, with exactly the same language.

Rules are named in the order in which `root` needs them, so two texts that differ only in the order
of their rules give the same Lark. LocalAI writes rules in the random order of a hash map.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from common.gbnf.lexemes import safe_productions
from common.gbnf.parser import GbnfError, parse
from common.gbnf.productions import Item, Productions
from common.gbnf.regular import reachable, regular_rules
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

_MAX_NESTING = 8


def gbnf_to_lark(text: str) -> str:
    """Return the grammar in llguidance's Lark, with `root` as `start`. Raises GbnfError."""
    try:
        rules = reachable(parse(text))
        return _lark_text(safe_productions(rules, regular_rules(rules)))
    except RecursionError:
        raise GbnfError("the rules are nested too deeply", text, 0) from None


def _lark_text(productions: Productions) -> str:
    terminals, writer = productions.terminals, _Terminals(productions.regular)

    def written(items: list[Item]) -> str:
        symbols = (
            terminals.get(item.symbol, item.symbol) + _counts(item.least, item.most)
            for item in items
        )
        return " ".join(symbols) or '""'

    lines = [
        f"{name}: {' | '.join(map(written, options))}"
        for name, options in productions.rules.items()
    ]
    for name in dict.fromkeys(terminals.values()):
        expr = productions.lexemes[name]
        body = writer.text(expr)
        # A lexeme cannot be empty; if it is optional, the rule says so.
        nullable = productions.edges.of(expr).nullable
        lines.append(f"{name}: {f'({body}) & /(?s:.+)/' if nullable else body}")
    return "\n".join([*lines, *writer.lines]) + "\n"


def _counts(least: int, most: int | None) -> str:
    match least, most:
        case 1, 1:
            return ""
        case 0, 1:
            return "?"
        case 0, None:
            return "*"
        case 1, None:
            return "+"
    return f"{{{least},{'' if most is None else most}}}"


class _Terminals:
    """Writes regular expressions as terminals; deeply nested parts become separate terminals."""

    def __init__(self, regular: Mapping[str, Expr]) -> None:
        self.lines: list[str] = []
        self._regular = regular
        self._names: dict[Expr, str] = {}

    def text(self, expr: Expr, depth: int = 0) -> str:
        match expr:
            case Literal(text):
                return json.dumps(text, ensure_ascii=False)
            case CharClass():
                return f"/[{''.join(map(_range, ranges_of(expr)))}]/"
            case Reference(name):
                return self._named(expr, self._regular[name])
        if depth >= _MAX_NESTING:
            return self._named(expr, expr)
        match expr:
            case Sequence(items):
                return f"({' '.join(self.text(i, depth + 1) for i in items)})" if items else '""'
            case Choice(options):
                return f"({' | '.join(self.text(option, depth + 1) for option in options)})"
            case Repeat(item, least, most):
                return f"({self.text(item, depth + 1)}){_counts(least, most)}"
        raise AssertionError(expr)

    def _named(self, key: Expr, body: Expr) -> str:
        if key not in self._names:
            name = self._names[key] = f"R{len(self._names)}"
            line = len(self.lines)
            self.lines.append("")
            self.lines[line] = f"{name}: {self.text(body)}"
        return self._names[key]


def _range(ends: tuple[int, int]) -> str:
    low, high = ends
    return f"\\x{{{low:X}}}" if low == high else f"\\x{{{low:X}}}-\\x{{{high:X}}}"
