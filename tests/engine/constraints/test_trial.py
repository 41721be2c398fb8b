"""Grammars of any shape and size: each is compiled, or refused with a message."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from backend.engine.constraints import trial
from backend.engine.constraints.compiler import ConstraintCompiler
from backend.engine.constraints.constraint import words
from backend.engine.constraints.spec import ConstraintSpec, Kind
from backend.engine.constraints.trial import MEMORY_KEPT, NO_PROCESS, answer_of
from backend.engine.errors import InvalidRequest, Overloaded
from backend.engine.units import MIB
from common.chat_format import ChatFormat
from common.gbnf import GbnfError, gbnf_to_lark
from tests.common.grammar_walks import ByteTokenizer, byte_tokenizer
from tests.engine.constraints.walks import allowed_ids, compiler_for
from tests.long import examples
from tests.open_files import more_than_select_takes

TINY = Path(__file__).parents[2] / "models" / "tiny_text"
BYTES = byte_tokenizer()
COMPILER = compiler_for(BYTES, ChatFormat.named("hermes"))
Schema = dict[str, Any]

WRAPPINGS: list[Callable[[Schema], Schema]] = [
    lambda inner: {"properties": {"a": inner}},
    lambda inner: {"type": "array", "items": inner},
    lambda inner: {"type": "array", "prefixItems": [inner, inner]},
    lambda inner: {"anyOf": [inner, {"type": "null"}]},
    lambda inner: {"oneOf": [{"type": "array", "items": inner}, {"const": 1}]},
    lambda inner: {"allOf": [inner, inner]},
    lambda inner: {"type": "object", "additionalProperties": inner},
    lambda inner: inner,
]
ENDS: list[Schema] = [{"const": 1}, {"type": "string", "pattern": "^a+$"}, {"enum": ["b", 2]}, {}]
LINKS: list[tuple[Kind, str, str, str]] = [
    ("lark", "start: r0", "r{0}: r{1}", 'r{0}: "a"'),
    ("lark", "start: r0", 'r{0}: "(" r{1} ")" | "b"', 'r{0}: "a"'),
    ("lark", "start: R0", 'R{0}: "x" R{1}', "R{0}: /a+/"),
    ("lark", "start: R0", "R{0}: R{1} & /a{{1,9}}/", "R{0}: /a+/"),
    ("gbnf", "root ::= r0", "r{0} ::= r{1}", 'r{0} ::= "a"'),
    ("gbnf", "root ::= r0", 'r{0} ::= "(" r{1} ")"', "r{0} ::= root?"),
    ("gbnf", "root ::= r0", "r{0} ::= r{1}? | [a-z] r{1}*", 'r{0} ::= "a"'),
]


@st.composite
def _chained_schemas(draw: st.DrawFn) -> ConstraintSpec:
    length = draw(st.integers(1, 4000))
    ways = draw(st.lists(st.sampled_from(WRAPPINGS), min_size=1, max_size=3))
    shared = {
        f"d{n}": ways[n % len(ways)]({"$ref": f"#/$defs/d{n + 1}"}) for n in range(length)
    } | {f"d{length}": draw(st.sampled_from(ENDS))}
    schema = {"$ref": "#/$defs/d0", "$defs": shared}
    if draw(st.booleans()):
        return ConstraintSpec("json_schema", json.dumps(schema))
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}, **schema}}
    return ConstraintSpec("calls", tools=({"type": "function", "function": function},))


@st.composite
def _nested_schemas(draw: st.DrawFn) -> ConstraintSpec:
    schema = draw(st.sampled_from(ENDS))
    for way in draw(st.lists(st.sampled_from(WRAPPINGS[:5]), max_size=80)):
        schema = way(schema)
    return ConstraintSpec("json_schema", json.dumps(schema)[:200_000])


@st.composite
def _wide_schemas(draw: st.DrawFn) -> ConstraintSpec:
    way = draw(st.sampled_from(["anyOf", "oneOf", "allOf", "prefixItems"]))
    make = draw(st.sampled_from(WRAPPINGS[:3]))
    ends = [*ENDS, {"type": "string", "minLength": 3}, {"type": "string", "pattern": "a"}]
    end = draw(st.sampled_from(ends))
    members = [make(end) for _ in range(draw(st.integers(1, 3000)))]
    return ConstraintSpec("json_schema", json.dumps({way: members}))


@st.composite
def _chained_rules(draw: st.DrawFn) -> ConstraintSpec:
    kind, first, link, last = draw(st.sampled_from(LINKS))
    length = draw(st.integers(1, 12_000))
    rules = [link.format(n, n + 1) for n in range(length)]
    return ConstraintSpec(kind, "\n".join([first, *rules, last.format(length), ""]))


@given(_chained_schemas() | _nested_schemas() | _wide_schemas() | _chained_rules())
@settings(max_examples=examples(30), deadline=None)
def test_any_grammar_compiles_or_is_refused(spec: ConstraintSpec) -> None:
    with suppress(InvalidRequest):
        constraint = COMPILER.compile(spec)
        for _ in range(5):
            if constraint.ended:
                break
            constraint.accept(allowed_ids(constraint, BYTES.size)[0])


def test_a_gbnf_grammar_that_is_too_deep_is_refused_as_gbnf() -> None:
    with pytest.raises(GbnfError, match="too deeply"):
        gbnf_to_lark('root ::= "a"' + "*" * 5000)


def _children() -> list[psutil.Process]:
    return psutil.Process().children()


def test_an_interrupted_trial_is_repeated() -> None:
    before = set(_children())
    compiler = compiler_for(BYTES, ChatFormat.named("plain"))
    compiler.compile(ConstraintSpec("regex", "a"))
    (child,) = set(_children()) - before
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    constraint = compiler.compile(ConstraintSpec("regex", "b"))
    assert allowed_ids(constraint, BYTES.size) == [ord("b")]
    (child,) = set(_children()) - before
    del compiler
    child.wait(60)


def test_a_grammar_is_refused_while_the_system_allows_no_more_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial, "_PROGRAM", "tests.engine.constraints.forkless_trial")
    compiler = compiler_for(BYTES, ChatFormat.named("hermes"))
    for _ in range(2):
        with pytest.raises(Overloaded):
            compiler.compile(ConstraintSpec("regex", "a+"))
    compiler.close()


def test_a_grammar_is_refused_if_its_socket_cannot_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system limits the descriptors that are on their way. The child process lives on."""

    def refused(*_: Any) -> int:
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    others = set(_children())
    compiler = compiler_for(BYTES, ChatFormat.named("hermes"))
    compiler.compile(ConstraintSpec("regex", "a"))
    own = set(_children()) - others
    assert len(own) == 1
    with monkeypatch.context() as patch:
        patch.setattr(socket, "send_fds", refused)
        with pytest.raises(Overloaded):
            compiler.compile(ConstraintSpec("regex", "b"))
    compiler.compile(ConstraintSpec("regex", "b"))
    assert set(_children()) - others == own
    compiler.close()


def test_a_refusal_that_comes_before_the_request_is_read() -> None:
    own, fork = socket.socketpair()
    with own, subprocess.Popen([sys.executable, "-c", ""]) as child:
        with fork:
            fork.sendall(json.dumps({"ended": NO_PROCESS}).encode() + b"\n")
        with pytest.raises(Overloaded):
            answer_of(own, child, "the grammar", {}, quick=True)


def test_a_grammar_that_was_compiled_is_not_tried_again() -> None:
    before = set(_children())
    compiler = compiler_for(BYTES, ChatFormat.named("plain"))
    compiler.compile(ConstraintSpec("gbnf", 'root ::= "a"'))
    (child,) = set(_children()) - before
    child.suspend()
    try:
        constraint = compiler.compile(ConstraintSpec("gbnf", 'root ::= "a"'))
    finally:
        child.resume()
    assert allowed_ids(constraint, BYTES.size) == [ord("a")]


def test_a_row_is_charged_for_its_masks() -> None:
    constraint = COMPILER.compile(ConstraintSpec("regex", "[a-z]*"))
    mask = np.zeros(words(BYTES.size), np.uint32)
    constraint.fill(mask)
    constraint.allowance = 0.0
    with pytest.raises(InvalidRequest, match="10 ms per token"):
        constraint.fill(mask)


def test_a_grammar_that_can_never_match_is_the_users_error() -> None:
    grammar = 'start: "x" /[0-9]{2}/ B\nB: "b"i & /b+/ & ~/bb/ & ~/b/'
    with pytest.raises(InvalidRequest, match="matches nothing"):  # noqa: PT012
        constraint = COMPILER.compile(ConstraintSpec("lark", grammar))
        for byte in b"x12":
            constraint.accept(byte)
            constraint.fill(np.zeros(words(BYTES.size), np.uint32))


def test_a_single_mask_may_not_take_a_rows_whole_allowance() -> None:
    text = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    size = text.get_vocab_size()
    alternatives = " | ".join("e " * length for length in range(2, 30))
    ambiguous = f'start: "." e\ne: {alternatives} | /[a-z]/ | /[ -~]/'
    compiler = compiler_for(ByteTokenizer(text, size), ChatFormat.named("plain"))
    constraint = compiler.compile(ConstraintSpec("lark", ambiguous))
    mask = np.zeros(words(size), np.uint32)
    for letter in ".aaaa":
        with suppress(InvalidRequest):
            constraint.accept(text.encode(letter).ids[-1])
            constraint.fill(mask)
    with pytest.raises(InvalidRequest, match="in too many ways"):
        constraint.fill(mask)
    assert constraint.allowance > 0


NORMALIZERS = {
    "NFC": normalizers.NFC(),
    "NFKC": normalizers.NFKC(),
    "lower case": normalizers.Lowercase(),
    "several": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
}


def _normalising(name: str) -> tuple[ConstraintCompiler, int]:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = NORMALIZERS[name]
    return compiler_for(tokenizer, ChatFormat.named("plain")), tokenizer.size


NORMALISING = {name: _normalising(name) for name in NORMALIZERS}


@pytest.mark.parametrize("name", NORMALIZERS)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8))
@settings(max_examples=15, deadline=None)
def test_letters_keep_their_case(name: str, text: str) -> None:
    compiler, size = NORMALISING[name]
    for wanted in ("e\u0301A" + text, text):
        quoted = wanted.replace("\\", "\\\\").replace('"', '\\"')
        constraint = compiler.compile(ConstraintSpec("gbnf", f'root ::= "{quoted}"'))
        for byte in wanted.encode():
            assert allowed_ids(constraint, size) == [byte]
            constraint.accept(byte)


def _large(number: int) -> ConstraintSpec:
    """A regular expression for which llguidance needs about 30 MB."""
    return ConstraintSpec("regex", f"{number:03}" * 80_000)


def test_grammars_are_kept_only_up_to_a_limit_of_memory() -> None:
    compiler = compiler_for(BYTES, ChatFormat.named("plain"))
    compiled = WeakSet(compiler.compile(_large(number)).source for number in range(8))
    gc.collect()
    alive = list(compiled)
    assert 0 < len(alive) < 8
    assert sum(one.bytes for one in alive) <= MEMORY_KEPT


LONG_TEXT = "ab cd " * 40_000


@pytest.mark.parametrize(
    "spec",
    [
        ConstraintSpec("json_schema", json.dumps({"const": LONG_TEXT})),
        ConstraintSpec("regex", LONG_TEXT),
        ConstraintSpec("regex", "(ab){200000}"),
        ConstraintSpec("json_schema", json.dumps({"pattern": "^((ab){999}){99}$"})),
        ConstraintSpec(
            "calls",
            tools=(
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {
                            "type": "object",
                            "properties": {"a": {"const": LONG_TEXT}},
                            "required": ["a"],
                        },
                    },
                },
            ),
        ),
    ],
    ids=lambda spec: spec.kind,
)
def test_a_long_constant_is_followed(spec: ConstraintSpec) -> None:
    """llguidance would compute the whole constant for each mask, beyond what a row may take."""
    constraint = COMPILER.compile(spec)
    constraint.allowance = 0.05  # plus 10 ms per token
    for _ in range(60):
        constraint.accept(allowed_ids(constraint, BYTES.size)[-1])


def test_a_trial_beside_more_open_files_than_select_takes() -> None:
    with more_than_select_takes():
        compiler = compiler_for(BYTES, ChatFormat.named("plain"))
        assert compiler.compile(ConstraintSpec("lark", 'start: "a"')) is not None
        compiler.close()


def test_a_grammar_is_refused_while_others_take_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All grammars in use share the memory; a grammar's part is free once its last row ends."""
    monkeypatch.setattr("backend.engine.constraints.compiler.MEMORY_TOGETHER", 50 * MIB)
    compiler = compiler_for(BYTES, ChatFormat.named("plain"))
    running = [compiler.compile(_large(1)), compiler.compile(_large(1))]
    with pytest.raises(Overloaded, match=r"of other requests take \d+ of 50 MiB"):
        compiler.compile(_large(2))
    compiler.compile(ConstraintSpec("regex", "a"))
    running.clear()
    assert allowed_ids(compiler.compile(_large(2)), BYTES.size)
