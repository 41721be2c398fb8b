"""GBNF, Lark and regular expressions: what they accept and cost, and how they are refused."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from backend.engine.constraints.compiler import MAX_TEXT
from backend.engine.constraints.constraint import words
from backend.engine.constraints.spec import ConstraintSpec, Kind
from backend.engine.errors import EngineFailed, InvalidRequest
from common.chat_format import ChatFormat
from common.gbnf import gbnf_to_lark
from tests.common.grammar_walks import byte_tokenizer
from tests.engine.constraints.gbnf_corpus import SHAPES, Shape
from tests.engine.constraints.walks import allowed_ids, byte_walk, compiler_for, ids_of

BYTES = byte_tokenizer()
COMPILER = compiler_for(BYTES, ChatFormat.named("plain"))


def takes(spec: ConstraintSpec, text: str) -> bool:
    """Whether each byte is allowed in turn, and the end after the last."""
    constraint = COMPILER.compile(spec)
    for byte in text.encode():
        if constraint.ended or byte not in allowed_ids(constraint, BYTES.size):
            return False
        constraint.accept(byte)
    return BYTES.end in allowed_ids(constraint, BYTES.size)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_grammars_of_the_host_accept_what_they_should(shape: Shape) -> None:
    spec = ConstraintSpec("gbnf", shape.grammar)
    assert [text for text in shape.takes if not takes(spec, text)] == []
    assert [text for text in shape.refuses if takes(spec, text)] == []


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_order_of_rules_does_not_matter(shape: Shape) -> None:
    rules = [r for r in _rules(shape.grammar) if not r.startswith("#")]
    random.Random(0).shuffle(rules)
    assert gbnf_to_lark("\n".join(rules)) == gbnf_to_lark(shape.grammar)


def _rules(grammar: str) -> list[str]:
    found: list[str] = []
    for line in grammar.splitlines():
        if "::=" in line.split('"')[0] or line.startswith("#"):
            found.append(line)
        elif found:
            found[-1] += "\n" + line
    return found


def test_lark_and_regular_expressions() -> None:
    assert takes(ConstraintSpec("lark", 'start: WORD "!"\nWORD: /[a-z]+/'), "hey!")
    assert takes(ConstraintSpec("regex", "a/[0-9]{2}|b"), "a/12")
    assert not takes(ConstraintSpec("regex", "a/[0-9]{2}|b"), "a/1")


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("gbnf", 'root ::= "a\nb', "line 1, column 10: this literal is never closed"),
        ("gbnf", 'root ::= "a"\nx ::= y', "line 2, column 7: the rule 'y' is not defined"),
        ("gbnf", 'x ::= "a"', "no rule 'root'"),
        ("gbnf", 'root ::= "a"{1,1000000}', "line 1, column 13.*at most 2000"),
        ("gbnf", "root ::= " + "(" * 5000 + '"a"', "nested more than 100 deep"),
        ("gbnf", "Write me a poem.", "line 1, column 7: expected '::='"),
        ("lark", 'start: "a"\n  | nothing', "line 1, column 8|line 2, column"),
        ("regex", "a(b", "character 2"),
        ("regex", "a" * (MAX_TEXT + 1), f"{MAX_TEXT} are allowed"),
    ],
)
def test_refusals_name_the_line(kind: Kind, text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        COMPILER.compile(ConstraintSpec(kind, text))


DOUBLING = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("gbnf", DOUBLING.replace("r0", "root") + '\nr60 ::= "x"'),
        ("gbnf", "root ::= " + " | ".join(f'("{"a" * i}" root?)' for i in range(1, 60))),
        ("gbnf", 'root ::= ("a"{1,2000} root "b"{1,2000} | [a-b]*){1,2000}'),
        ("regex", "((a{1,1000}){1,1000}){1,1000}"),
        ("regex", "(a|b)*a(a|b){400}"),
        ("json_schema", '{"type":"array","items":{"type":"string"},"minItems":100000}'),
        ("lark", "start: " + "(" * 2000 + '"a"' + ")" * 2000),
    ],
)
def test_hostile_grammars_are_cheap(kind: Kind, text: str) -> None:
    """Refused or harmless: a walk fails, if at all, with an error for its row alone."""
    refusal = ""
    try:
        constraint = COMPILER.compile(ConstraintSpec(kind, text))
        for _ in range(200):
            if constraint.ended:
                break
            constraint.accept(allowed_ids(constraint, BYTES.size)[0])
    except (InvalidRequest, EngineFailed) as fault:
        refusal = str(fault)
    assert "backtrace" not in refusal


def test_rows_do_not_share_matcher_state_and_threads_may_compile_concurrently() -> None:
    specs = [ConstraintSpec("regex", f"[a-z]{{{n % 4 + 1}}}") for n in range(32)]
    with ThreadPoolExecutor(4) as threads:
        constraints = list(threads.map(COMPILER.compile, specs))
    for number, constraint in enumerate(constraints):
        assert len(byte_walk(BYTES, number).text(constraint)) == number % 4 + 1


def test_the_end_is_allowed_exactly_where_the_grammar_accepts() -> None:
    constraint = COMPILER.compile(ConstraintSpec("regex", "ab?"))
    assert allowed_ids(constraint, BYTES.size) == [ord("a")]
    constraint.accept(ord("a"))
    assert allowed_ids(constraint, BYTES.size) == [ord("b"), BYTES.end]
    constraint.accept(ord("b"))
    assert constraint.ended
    assert allowed_ids(constraint, BYTES.size) == [BYTES.end]
    constraint.accept(BYTES.end)


def test_an_answer_can_restart_from_its_delivered_tokens() -> None:
    constraint = COMPILER.compile(ConstraintSpec("regex", "ab?c"))
    for token in "ac":
        constraint.accept(ord(token))
    assert allowed_ids(constraint, BYTES.size) == [BYTES.end]
    constraint.restart([ord("a")])
    assert allowed_ids(constraint, BYTES.size) == [ord("b"), ord("c")]
    constraint.restart([])
    assert allowed_ids(constraint, BYTES.size) == [ord("a")]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_looking_ahead_equals_stepping_and_changes_nothing(shape: Shape) -> None:
    """The draft tokens are partly wrong, and begin at random positions of random answers."""
    dice = random.Random(1)
    spec = ConstraintSpec("gbnf", shape.grammar)
    for seed in range(6):
        answer = list(byte_walk(BYTES, seed).text(COMPILER.compile(spec)).encode())
        ahead = COMPILER.compile(spec)
        done = 0
        while done < len(answer) and not ahead.ended:
            draft_tokens = answer[done : done + dice.randrange(6)]
            if draft_tokens and dice.random() < 0.3:
                draft_tokens[dice.randrange(len(draft_tokens))] = dice.randrange(128)
            steps = COMPILER.compile(spec)
            steps.restart(answer[:done])
            masks = np.zeros((len(draft_tokens), words(BYTES.size)), np.uint32)
            taken = ahead.look_ahead(draft_tokens, masks)
            for guess, mask in zip(draft_tokens[:taken], masks, strict=False):
                assert guess in allowed_ids(steps, BYTES.size)
                steps.accept(guess)
                if not steps.ended:
                    assert ids_of(mask) == allowed_ids(steps, BYTES.size)
            if taken < len(draft_tokens) and not steps.ended:
                assert draft_tokens[taken] not in allowed_ids(steps, BYTES.size)
            for token in answer[done : done + 1 + dice.randrange(3)]:
                assert token in allowed_ids(ahead, BYTES.size)
                ahead.accept(token)
                done += 1


def test_looking_ahead_stops_at_a_token_beyond_the_tokenizers_vocabulary() -> None:
    constraint = COMPILER.compile(ConstraintSpec("regex", "[a-c]{1,9}"))
    masks = np.zeros((3, words(BYTES.size)), np.uint32)
    assert constraint.look_ahead([97, 99_999, 98], masks) == 1
    assert constraint.look_ahead([97, BYTES.size, 98], masks) == 1
    assert constraint.look_ahead([97, 98, 99], masks) == 3


def test_looking_ahead_leaves_the_state_unchanged() -> None:
    constraint = COMPILER.compile(ConstraintSpec("regex", "abcd"))
    constraint.accept(ord("a"))
    masks = np.zeros((3, words(BYTES.size)), np.uint32)
    assert constraint.look_ahead(list(map(ord, "bcx")), masks) == 2
    assert allowed_ids(constraint, BYTES.size) == [ord("b")]
    constraint.restart(list(map(ord, "abc")))
    assert allowed_ids(constraint, BYTES.size) == [ord("d")]


def test_slow_guesses_do_not_count_against_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = COMPILER.compile(ConstraintSpec("regex", "[a-c]{1,9}"))
    masks = np.zeros((3, words(BYTES.size)), np.uint32)
    rule.accept(97)
    left = rule.allowance
    with monkeypatch.context() as patch:
        patch.setattr("backend.engine.constraints.constraint.TOKEN_SECONDS", -1.0)
        assert rule.look_ahead([97, 98, 99], masks) == 0
    assert rule.look_ahead([97, 98, 99], masks) == 3
    assert rule.allowance == left
    rule.accept(98)
    assert allowed_ids(rule, BYTES.size) == [97, 98, 99, BYTES.end]


def test_a_token_that_is_not_allowed_fails_only_its_row() -> None:
    spec = ConstraintSpec("regex", "ab")
    broken, other = COMPILER.compile(spec), COMPILER.compile(spec)
    with pytest.raises(EngineFailed):
        broken.accept(ord("x"))
    with pytest.raises(EngineFailed):
        allowed_ids(broken, BYTES.size)
    other.accept(ord("a"))
    assert allowed_ids(other, BYTES.size) == [ord("b")]
