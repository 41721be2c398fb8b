"""Converts a grammar to productions over lexemes, and finds which lexemes may follow each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from common.gbnf.regular import is_nullable, nullable_rules
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
    """`start` and the rules that it needs, each a list of alternatives.

    regular: the regular rules of the grammar.
    lexable: returns whether a regular expression may be a lexeme. Others are divided into parts;
        single characters are lexemes in any case.
    """

    grammar: Mapping[str, Expr]
    regular: Mapping[str, Expr]
    lexable: Callable[[Expr], bool]
    rules: dict[str, list[list[Item]]] = field(default_factory=dict)
    lexemes: dict[str, Expr] = field(default_factory=dict)
    nullable: frozenset[str] = frozenset()
    _names: dict[tuple[str, Expr], str] = field(default_factory=dict)
    _waiting: deque[tuple[str, Expr, bool]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.nullable = nullable_rules(self.regular)
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
        return [Item(self._named_lexeme(expr), 0 if is_nullable(expr, self.nullable) else 1)]

    def _named_lexeme(self, expr: Expr) -> str:
        if ("lexeme", expr) not in self._names:
            name = f"T{len(self.lexemes)}"
            self._names["lexeme", expr] = name
            self.lexemes[name] = expr
        return self._names["lexeme", expr]

    def _opened(self, expr: Expr) -> list[Item]:
        """Return a regular expression as several lexemes, which are divided again if needed."""
        match expr:
            case Literal(text):
                return [Item(self._named_lexeme(Literal(character))) for character in text]
            case CharClass():
                return [Item(self._named_lexeme(expr))]
            case Sequence(items):
                return [piece for item in items for piece in self._lexeme(item)]
            case Repeat(CharClass() as item, least, most):
                return [Item(self._named_lexeme(item), least, most)]
            case Repeat(item, least, most):
                return [Item(self._rule("opened", item, item, opened=True), least, most)]
            case Reference(name):
                return [Item(self._rule("rule", expr, self.regular[name], opened=True))]
        return [Item(self._rule("opened", expr, expr, opened=True))]


def successors(productions: Productions) -> tuple[frozenset[str], dict[str, frozenset[str]]]:
    """Return the lexemes that may come first, and for each lexeme those that may follow it."""
    rules = productions.rules
    nullable = _nullable(rules)
    first = _spread(
        {
            name: [i.symbol for option in options for i in _heads(option, nullable)]
            for name, options in rules.items()
        },
        {name: {name} for name in productions.lexemes},
    )
    after: dict[str, set[str]] = {}
    inherits: dict[str, list[str]] = {}
    for name, options in rules.items():
        for option in options:
            for place, item in enumerate(option):
                mine = after.setdefault(item.symbol, set())
                rest = option[place + 1 :]
                for head in _heads(rest, nullable):
                    mine |= first[head.symbol]
                if item.most is None or item.most > 1:
                    mine |= first[item.symbol]
                if all(i.least == 0 or i.symbol in nullable for i in rest):
                    inherits.setdefault(item.symbol, []).append(name)
    follow = _spread(inherits, after)
    return frozenset(first[ROOT]), {
        name: frozenset(follow.get(name, ())) for name in productions.lexemes
    }


def _nullable(rules: Mapping[str, list[list[Item]]]) -> set[str]:
    found: set[str] = set()
    size = -1
    while len(found) != size:
        size = len(found)
        for name in reversed(list(rules)):
            if name not in found and any(
                all(item.least == 0 or item.symbol in found for item in option)
                for option in rules[name]
            ):
                found.add(name)
    return found


def _heads(option: Iterable[Item], nullable: set[str]) -> list[Item]:
    """Return the items of an alternative that may come first."""
    found = []
    for item in option:
        found.append(item)
        if item.least and item.symbol not in nullable:
            break
    return found


def _spread(
    sources: Mapping[str, Iterable[str]], own: Mapping[str, set[str]]
) -> dict[str, set[str]]:
    """Return for each symbol its own members, and those of its direct and indirect sources."""
    found = {name: set(members) for name, members in own.items()}
    users: dict[str, list[str]] = {}
    for name, others in sources.items():
        found.setdefault(name, set())
        for other in others:
            found.setdefault(other, set())
            users.setdefault(other, []).append(name)
    waiting = deque(found)
    while waiting:
        name = waiting.popleft()
        for user in users.get(name, ()):
            if not found[name] <= found[user]:
                found[user] |= found[name]
                waiting.append(user)
    return found
