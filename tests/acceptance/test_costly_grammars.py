"""Grammars that would end the process, or take all of the time, if nothing limited them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import pytest

from backend.engine.constraints.schema import MOST_OPTIONAL
from tests.acceptance.backend import WAIT, Backend, chat, refusal, text_answer
from tests.acceptance.test_chat import TOOLS
from wire import backend_pb2 as pb

DEEP = "too deeply"


def _chain(first: str, rule: str, last: str, length: int) -> str:
    rules = [rule.format(this=n, next=n + 1) for n in range(length)]
    return "\n".join([first, *rules, last.format(this=length), ""])


def _references(length: int, *, nested: bool = False) -> str:
    """Definitions that each refer to the next, either directly or as a property."""
    shared: dict[str, Any] = {}
    for n in range(length):
        following = {"$ref": f"#/$defs/d{n + 1}"}
        shared[f"d{n}"] = {"properties": {"a": following}} if nested else following
    shared[f"d{length}"] = {"const": "end"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": shared}, separators=(",", ":"))


def _lark(length: int) -> str:
    return _chain("start: r0", "r{this}: r{next}", 'r{this}: "end"', length)


def _gbnf(length: int) -> str:
    return _chain("root ::= r0", 'r{this} ::= "" r{next}', 'r{this} ::= "end" root?', length)


def _asking(grammar: str, kind: str, **fields: Any) -> pb.PredictOptions:
    metadata = {"mlx.grammar_type": kind}
    return pb.PredictOptions(Prompt="x", Grammar=grammar, Metadata=metadata, Tokens=8, **fields)


def _wide(keyword: str) -> str:
    members = [{"type": "object", "properties": {f"p{n}": {"type": "null"}}} for n in range(2000)]
    return json.dumps({keyword: members})


def _optional(length: int) -> str:
    properties = {f"p{n}": {"const": 0} for n in range(length)}
    return json.dumps({"type": "object", "properties": properties})


def _patterns(length: int) -> str:
    return json.dumps({"allOf": [{"type": "string", "pattern": f"a{n}"} for n in range(length)]})


@pytest.mark.parametrize(
    ("grammar", "kind", "beginning"),
    [
        (_references(1000), "json_schema", '"end"'),
        (_references(7000), "json_schema", '"end"'),
        (_references(1000, nested=True), "json_schema", ""),
        (_lark(3000), "lark", "end"),
        (_gbnf(200), "gbnf", "end"),
        (_optional(MOST_OPTIONAL), "json_schema", "{"),
    ],
)
def test_a_large_grammar_is_followed(
    served: Backend, grammar: str, kind: str, beginning: str
) -> None:
    assert text_answer(served, _asking(grammar, kind)).startswith(beginning)


@pytest.mark.parametrize(
    ("grammar", "kind", "why"),
    [
        (_references(4800, nested=True), "json_schema", DEEP),
        (_lark(18_000), "lark", DEEP),
        (_chain("start: R0", "R{this}: R{next}", 'R{this}: "end"', 18_000), "lark", DEEP),
        (_gbnf(9000), "gbnf", "in too many ways"),
        ('root ::= "a"' + "*" * 100_000, "gbnf", DEEP),
        (_wide("allOf"), "json_schema", "too large"),
        (_wide("anyOf"), "json_schema", "in too many ways"),
        (_patterns(30), "json_schema", "takes more than"),
        ("start: A\nA: " + " & ".join(f"/(?s:.*)a{n}(?s:.*)/" for n in range(30)), "lark", "takes"),
        (_optional(MOST_OPTIONAL + 1), "json_schema", "1201 optional properties, but at most 1200"),
    ],
)
def test_a_grammar_that_costs_too_much_is_refused_alone(
    served: Backend, grammar: str, kind: str, why: str
) -> None:
    counting = chat("Count to 30.")
    alone = text_answer(served, counting)
    with ThreadPoolExecutor(1) as other:
        beside = other.submit(text_answer, served, counting)
        assert why in refusal(served, _asking(grammar, kind))
        assert beside.result() == alone
    assert text_answer(served, _asking('root ::= "a" | "b"', "gbnf")) in ("a", "b")


@pytest.mark.parametrize(
    ("grammar", "kind"),
    [
        ("start: A B B\nA: /[xy]/\nB: /b+/\n", "lark"),
        ('root ::= [xy] rest\nrest ::= "b" rest', "gbnf"),
    ],
)
def test_a_grammar_that_forces_a_text_without_end_stops_nobody(
    served: Backend, grammar: str, kind: str
) -> None:
    with suppress(grpc.RpcError):
        served.stub.Predict(_asking(grammar, kind), timeout=WAIT)
    assert text_answer(served, chat("Count to 3.")) == "1 2 3"


def test_a_quick_grammar_overtakes_slow_ones(served: Backend) -> None:
    costly = [_asking(_patterns(length), "json_schema") for length in range(30, 34)]
    slow = [served.stub.Predict.future(each, timeout=WAIT) for each in costly]
    assert text_answer(served, _asking('root ::= "d"', "gbnf")) == "d"
    assert not any(call.done() for call in slow)
    for call in slow:
        call.cancel()


def test_deeply_nested_arguments_are_refused_with_a_message(served: Backend) -> None:
    """The refusal of some depths names the nesting; deeper arguments count as text.

    That text is too long for the model. Python's version decides which depths count as text."""
    refusals = [ended for depth in (900, 2000) if (ended := _refusal_of_depth(served, depth))]
    assert {code for code, _ in refusals} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert any("nested too deeply" in message for _, message in refusals)


def _refusal_of_depth(served: Backend, depth: int) -> tuple[grpc.StatusCode, str] | None:
    """The status for a call with arguments of this depth; None if it is accepted."""
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        pb.Message(role="user", content="x"),
        pb.Message(role="assistant", tool_calls=json.dumps([call])),
        pb.Message(role="tool", content="y", tool_call_id="1"),
    ]
    request = pb.PredictOptions(Messages=messages, UseTokenizerTemplate=True, Tools=TOOLS)
    try:
        served.stub.Predict(request, timeout=WAIT)
    except grpc.RpcError as failure:
        return failure.code(), str(failure.details())
    return None


def test_the_process_that_tries_grammars_ends_with_the_model(bare: Backend) -> None:
    before = bare.process().children()
    bare.load()  # a second after it, the process is started without a grammar
    assert text_answer(bare, _asking('root ::= "a"', "gbnf")) == "a"
    new = [child for child in bare.process().children() if child not in before]
    (trial,) = (child for child in new if "trial_process" in " ".join(child.cmdline()))
    bare.stub.Free(pb.HealthMessage(), timeout=WAIT)
    trial.wait(WAIT)
    assert bare.stub.Health(pb.HealthMessage(), timeout=WAIT)


def test_an_abandoned_call_does_not_delay_others(served: Backend) -> None:
    costly = _asking(_patterns(30), "json_schema")
    leaving = [served.stub.Predict.future(costly, timeout=WAIT) for _ in range(2)]
    for call in leaving:
        call.cancel()
    assert text_answer(served, _asking('root ::= "c"', "gbnf")) == "c"
    with pytest.raises(grpc.FutureCancelledError):
        leaving[0].result()
