"""The Lark form of a GBNF grammar accepts exactly the same texts."""

from __future__ import annotations

import re
from functools import cache
from itertools import product

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.gbnf import gbnf_to_lark, parse
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
from tests.common.grammar_walks import byte_tokenizer, texts_of
from tests.engine.constraints.gbnf_corpus import TREE
from tests.long import examples

LETTERS = "abc"
LONGEST = 4
TABLE = byte_tokenizer().table()
NAMES = ["root", "one", "two-b"]

_literals = st.text(LETTERS, max_size=3).map(lambda text: f'"{text}"')
_classes = st.sampled_from(["[a]", "[ab]", "[^a]", "[b-c]", "."])
_atoms = _literals | _classes | st.sampled_from(NAMES)


def _joined(parts: list[str], by: str) -> str:
    return by.join(parts)


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=1, max_size=3)
    repeated = st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,2}", "{0,1}", "{2,}"]))
    return (
        several.map(lambda parts: f"({_joined(parts, ' ')})")
        | several.map(lambda parts: f"({_joined(parts, ' | ')})")
        | repeated.map(lambda pair: f"({pair[0]}){pair[1]}")
    )


_bodies = st.lists(st.recursive(_atoms, _grown, max_leaves=6), min_size=1, max_size=3)


def ends(rules: dict[str, Expr], text: str) -> bool:
    """Whether the rules accept a text, by the sets of positions where each expression may end.

    Recursion is followed to its fixed point, so left recursion is no special case.
    """
    known: dict[tuple[str, int], frozenset[int]] = {}

    def run(expr: Expr, at: int) -> frozenset[int]:
        match expr:
            case Literal(literal):
                return frozenset([at + len(literal)] if text.startswith(literal, at) else [])
            case CharClass():
                fits = at < len(text) and any(
                    low <= ord(text[at]) <= high for low, high in ranges_of(expr)
                )
                return frozenset([at + 1] if fits else [])
            case Reference(name):
                return known.setdefault((name, at), frozenset())
            case Choice(options):
                return frozenset().union(*(run(option, at) for option in options))
            case Sequence(items):
                places = frozenset([at])
                for item in items:
                    places = frozenset().union(*(run(item, place) for place in places))
                return places
            case Repeat(item, least, most):
                places, found, turn = frozenset([at]), set(), 0
                seen: set[frozenset[int]] = set()
                if least == 0:
                    found.add(at)
                while places and (most is None or turn < most):
                    turn += 1
                    places = frozenset().union(*(run(item, place) for place in places))
                    if turn >= least:
                        found |= places
                        if most is None and places in seen:
                            break
                        seen.add(places)
                return frozenset(found)
        raise AssertionError(expr)

    known["root", 0] = frozenset()
    before: dict[tuple[str, int], frozenset[int]] = {}
    while before != known:
        before = dict(known)
        for name, at in before:
            known[name, at] |= run(rules[name], at)
    return len(text) in known["root", 0]


@cache
def _all_texts() -> list[str]:
    return ["".join(t) for n in range(LONGEST + 1) for t in product(LETTERS, repeat=n)]


def language(grammar: str) -> set[str]:
    rules = parse(grammar)
    return {text for text in _all_texts() if ends(rules, text)}


def accepted(grammar: str) -> set[str]:
    matcher = llguidance.LLMatcher(TABLE, gbnf_to_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return {text.decode() for text in texts_of(matcher, LETTERS.encode(), LONGEST)}


@settings(max_examples=examples(30))
@given(st.lists(_bodies, min_size=3, max_size=3))
def test_any_grammar(bodies: list[list[str]]) -> None:
    grammar = "\n".join(
        f"{name} ::= {_joined(body, ' | ')}" for name, body in zip(NAMES, bodies, strict=True)
    )
    expected = language(grammar)
    if expected:
        assert accepted(grammar) == expected, gbnf_to_lark(grammar)


def test_strings_are_lexemes_also_where_alternatives_begin_alike() -> None:
    """A grammar of single characters would take many times as long for each token in a string."""
    assert re.search(r'^R\d+: \("\\"" \(.*\)\* "\\"" R\d+\)$', gbnf_to_lark(TREE), re.MULTILINE)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= [a-c]* "abc"',
        'root ::= "a" root "b" | [a-c]* "abc"',
        'root ::= "a" root | [a-c]* | "ab" "cc" root',
        "root ::= root [ab] | [c]",
        'root ::= one "c"\none ::= (one "a" | "ab" | two)+\ntwo ::= "b" root? "b"',
        'root ::= "" | one root\none ::= [^b] | "b" one',
        'root ::= ("a" | "ab") ("c" | "bc") root?',
    ],
)
def test_grammars_that_a_greedy_lexer_would_misread(grammar: str) -> None:
    assert accepted(grammar) == language(grammar)
