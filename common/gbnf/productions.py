"""Converts a grammar to productions over lexemes, and finds which lexemes may follow each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from common.gbnf.edges import EdgesOf
from common.gbnf.syntax import (
    CharClass,
    Choice,
    Expr,
    Literal,
    Reference,
    Repeat,
    Sequence,
    references,
    sequence,
)

ROOT = "start"


@dataclass(frozen=True, slots=True)
class Item:
    """A symbol with repetition: a rule if it is in `Productions.rules`, else a lexeme."""

    symbol: str
    least: int = 1
    most: int | None = 1


@dataclass
class Productions:
    """`start` and the rules that it needs, each a list of alternatives."""

    grammar: Mapping[str, Expr]
    regular: Mapping[str, Expr]  # the regular rules of the grammar
    edges: EdgesOf  # the edges of regular expressions
    # Returns whether a regular expression may be a lexeme. Others are divided into parts; single
    # characters are lexemes in any case.
    lexable: Callable[[Expr], bool]
    rules: dict[str, list[list[Item]]] = field(default_factory=dict)
    # The expressions of lexemes. A lexeme has one position in the productions, because what may
    # follow an expression depends on its position.
    lexemes: dict[str, Expr] = field(default_factory=dict)
    # The names of lexemes → the first lexeme with the same expression.
    terminals: dict[str, str] = field(default_factory=dict)
    _names: dict[tuple[str, Expr], str] = field(default_factory=dict)
    _waiting: deque[tuple[str, Expr, bool]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        root = Reference("root")
        if "root" in self.regular:
            self.rules[ROOT] = [self._lexeme(root)]
        else:
            self._names["rule", root] = ROOT
            self._waiting.append((ROOT, self.grammar["root"], False))
        while self._waiting:
            name, body, opened = self._waiting.popleft()
            options = body.options if isinstance(body, Choice) else (body,)
            convert = self._lexeme if opened else self._items
            self.rules[name] = [convert(option) for option in options]

    def _is_regular(self, expr: Expr) -> bool:
        return all(name in self.regular for name in references(expr))

    def _rule(self, kind: str, key: Expr, body: Expr, *, opened: bool = False) -> str:
        if (kind, key) not in self._names:
            name = f"n{len(self._names)}"
            self._names[kind, key] = name
            self._waiting.append((name, body, opened))
        return self._names[kind, key]

    def _items(self, expr: Expr) -> list[Item]:
        """Return an expression as items; every maximal regular part becomes a lexeme."""
        if self._is_regular(expr):
            return self._lexeme(expr)
        match expr:
            case Sequence(items):
                found: list[Item] = []
                run: list[Expr] = []
                for item in items:
                    if self._is_regular(item):
                        run.append(item)
                        continue
                    found += self._lexeme(sequence(*run)) + self._items(item)
                    run = []
                return found + self._lexeme(sequence(*run))
            case Repeat(item, least, most):
                return [Item(self._rule("group", item, item), least, most)]
            case Reference(name):
                return [Item(self._rule("rule", expr, self.grammar[name]))]
        return [Item(self._rule("group", expr, expr))]

    def _lexeme(self, expr: Expr) -> list[Item]:
        """Return a regular expression as one lexeme, or as its parts if it cannot be one."""
        if expr == Sequence(()):
            return []
        if not self.lexable(expr):
            return self._opened(expr)
        return [Item(self._new_lexeme(expr), 0 if self.edges.of(expr).nullable else 1)]

    def _new_lexeme(self, expr: Expr) -> str:
        name = f"T{len(self.lexemes)}"
        terminal = self._names.setdefault(("terminal", expr), name)
        if expr == Literal(""):  # has no characters that its position could distinguish
            name = terminal
        self.lexemes[name], self.terminals[name] = expr, terminal
        return name

    def _opened(self, expr: Expr) -> list[Item]:
        """Return a regular expression as several lexemes, which are divided again if needed."""
        match expr:
            case Literal(text):
                return [Item(self._new_lexeme(Literal(character))) for character in text]
            case CharClass():
                return [Item(self._new_lexeme(expr))]
            case Sequence(items):
                return [piece for item in items for piece in self._lexeme(item)]
            case Repeat(CharClass() as item, least, most):
                return [Item(self._new_lexeme(item), least, most)]
            case Repeat(item, least, most):
                return [Item(self._rule("opened", item, item, opened=True), least, most)]
            case Reference(name):
                return [Item(self._rule("rule", expr, self.regular[name], opened=True))]
        return [Item(self._rule("opened", expr, expr, opened=True))]


def successors(productions: Productions) -> tuple[frozenset[str], dict[str, frozenset[str]]]:
    """Return the lexemes that may come first, and for each lexeme those that may follow it."""
    rules, nullable = productions.rules, set[str]()
    first = {name: set[str]() for name in rules} | {name: {name} for name in productions.lexemes}
    after = {name: set[str]() for name in first}

    def can_be_empty(item: Item) -> bool:
        return item.least == 0 or item.symbol in nullable

    def find_first() -> int:
        for name in reversed(rules):
            for option in rules[name]:
                for item in option:
                    first[name] |= first[item.symbol]
                    if not can_be_empty(item):
                        break
                else:
                    nullable.add(name)
        return len(nullable) + sum(map(len, first.values()))

    def find_after() -> int:
        for name, options in rules.items():
            for option in options:
                following = after[name]
                for item in reversed(option):
                    own = first[item.symbol]
                    repeats = item.most is None or item.most > 1
                    after[item.symbol] |= following | own if repeats else following
                    following = following | own if can_be_empty(item) else own
        return sum(map(len, after.values()))

    for find in (find_first, find_after):
        size = -1
        while size != (size := find()):
            pass
    return frozenset(first[ROOT]), {name: frozenset(after[name]) for name in productions.lexemes}
