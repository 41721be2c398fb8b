"""Answers with a required form: grammars, schemas and forced calls, beside free answers."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import jsonschema
import pytest

from tests.acceptance.backend import WAIT, Backend, chat, text_of
from tests.acceptance.test_chat import TOOLS, WEATHER
from tests.rpc.localai_host import streamed, unary
from wire import backend_pb2 as pb

HOT: dict[str, Any] = {"Temperature": 1.2, "TopP": 1.0}
THINKING = {"enable_thinking": "true"}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é🚀"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"],
        },
    },
}
JSON_OBJECT = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null")
object ::= "{" (
            string ":" value
    ("," string ":" value)*
  )? "}"
array  ::= "[" ( value ("," value)* )? "]" # a comment
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ([0-9] | [1-9] [0-9]{0,5}) ("." [0-9]{1,3})?
"""


def _reply_to(backend: Backend, request: pb.PredictOptions) -> pb.Reply:
    reply: pb.Reply = backend.stub.Predict(request, timeout=WAIT)
    return reply


@pytest.mark.parametrize("seed", range(8))
def test_a_schema_holds_at_any_temperature(served: Backend, seed: int) -> None:
    request = chat(
        "Tell me a long story about a cat.", Grammar=json.dumps(PERSON), Seed=seed, **HOT
    )
    text = _reply_to(served, request).message.decode()
    jsonschema.validate(json.loads(text), PERSON)
    assert text_of(served.stub.PredictStream(request, timeout=WAIT)) == text


def test_a_host_grammar_holds_up_to_the_token_limit(served: Backend) -> None:
    whole = 0
    for seed in range(24):
        request = chat("Say hello.", Grammar=JSON_OBJECT, Tokens=60, Seed=seed, **HOT)
        reply = _reply_to(served, request)
        if reply.tokens < 60:
            assert isinstance(json.loads(reply.message), dict)
            whole += 1
        else:
            assert reply.message.startswith(b"{")
    assert whole


def test_an_answer_ends_when_its_grammar_ends(served: Backend) -> None:
    reply = _reply_to(served, pb.PredictOptions(Prompt="x", Grammar='root ::= "yes" | "no"'))
    assert reply.message in (b"yes", b"no")
    for ending in ({"IgnoreEOS": True}, {"Metadata": {"mlx.min_tokens": "50"}}):
        request = pb.PredictOptions(Prompt="x", Grammar='root ::= "yes" | "no"', **ending)
        assert _reply_to(served, request).message in (b"yes", b"no")


@pytest.mark.parametrize(
    ("grammar", "kind", "wanted"),
    [
        ("[0-9]{3}-[a-c]", "regex", r"[0-9]{3}-[a-c]"),
        ('start: "<" /[xy]{4}/ ">"', "lark", r"<[xy]{4}>"),
        ('root ::= [α-γ]{2} "é"', "gbnf", r"[α-γ]{2}é"),
    ],
)
def test_every_kind_of_grammar_is_enforced(
    served: Backend, grammar: str, kind: str, wanted: str
) -> None:
    request = pb.PredictOptions(
        Prompt="x", Grammar=grammar, Metadata={"mlx.grammar_type": kind}, Seed=1, **HOT
    )
    text = _reply_to(served, request).message.decode()
    jsonschema.validate(text, {"type": "string", "pattern": f"^{wanted}$"})


def test_reasoning_precedes_the_constrained_answer(served: Backend) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    request = chat("What is 3 + 4?", Grammar=json.dumps(schema), Metadata=THINKING, Tokens=120)
    seen = unary(_reply_to(served, request), tools=False)
    assert "I have to find 3 plus 4." in seen.reasoning
    jsonschema.validate(json.loads(seen.content), schema)


@pytest.mark.parametrize("metadata", [THINKING, {"enable_thinking": "false"}])
def test_a_required_call_is_made(served: Backend, metadata: dict[str, str]) -> None:
    """Without the constraint the model would answer this question in words."""
    tools = json.dumps([WEATHER, TIME])
    request = chat(
        "What is the capital of France?", Tools=tools, ToolChoice='"required"', Metadata=metadata
    )
    seen = streamed(served.stub.PredictStream(request, timeout=WAIT), tools=True)
    whole = unary(_reply_to(served, request), tools=True)
    assert (seen.content, seen.reasoning, seen.calls) == ("", whole.reasoning, whole.calls)
    assert seen.calls
    functions: dict[str, Any] = {
        tool["function"]["name"]: tool["function"]  # type: ignore[index]
        for tool in (WEATHER, TIME)
    }
    for name, arguments in seen.calls:
        jsonschema.validate(json.loads(arguments), functions[name]["parameters"])


@pytest.mark.parametrize("seed", range(4))
def test_a_named_function_is_called(served: Backend, seed: int) -> None:
    choice = json.dumps({"type": "function", "function": {"name": "get_time"}})
    request = chat(
        "What is the weather in Paris?",
        Tools=json.dumps([WEATHER, TIME]),
        ToolChoice=choice,
        Seed=seed,
        **HOT,
    )
    seen = streamed(served.stub.PredictStream(request, timeout=WAIT), tools=True)
    assert [name for name, _ in seen.calls] == ["get_time"]
    jsonschema.validate(json.loads(seen.calls[0][1]), TIME["function"]["parameters"])  # type: ignore[index]


def test_a_strict_tool_is_called_as_declared_and_only_when_needed(served: Backend) -> None:
    strict = json.loads(TOOLS)
    strict[0]["function"]["strict"] = True
    tools = json.dumps(strict)
    asked = unary(_reply_to(served, chat("What is the weather in Paris?", Tools=tools)), tools=True)
    assert [(name, json.loads(text)) for name, text in asked.calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    answer = unary(
        _reply_to(served, chat("What is the capital of France?", Tools=tools)), tools=True
    )
    assert (answer.content, answer.calls) == ("The capital of France is Paris.", [])


def test_constrained_and_free_answers_share_a_batch(served: Backend) -> None:
    free = [chat(f"Count to {last}.") for last in (20, 31, 42, 53)]
    bound = [chat("Say hello.", Grammar=json.dumps(PERSON), Seed=seed, **HOT) for seed in range(4)]
    bound.append(chat("What is the weather in Rome?", Tools=TOOLS, ToolChoice="required"))
    mixed = [request for pair in zip(free, bound, strict=False) for request in pair] + bound[4:]

    def ask(request: pb.PredictOptions) -> list[Any]:
        seen = streamed(served.stub.PredictStream(request, timeout=WAIT), tools=bool(request.Tools))
        return [seen.content, seen.reasoning, seen.calls]

    alone = [ask(request) for request in mixed]
    with ThreadPoolExecutor(len(mixed)) as clients:
        assert list(clients.map(ask, mixed)) == alone


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('root ::= "a" (', "line 1"),
        ('root ::= "a"\nother ::= missing', "line 2"),
        ('start ::= "x"', "root"),
        ('{"type": "nonsense"}', "nonsense"),
        ('{"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}', "none"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nest"),
        ('root ::= [a-z]{1,1000000} "x"', "at most"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(
    served: Backend, grammar: str, words: str
) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        _reply_to(served, pb.PredictOptions(Prompt="x", Grammar=grammar, Tokens=5))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in (refusal.value.details() or "")
    assert _reply_to(served, chat("Count to 3.")).message == b"1 2 3"


LOCALAI_CALL = r"""
root ::= "{" space "\"arguments\"" space ":" space arguments "," space "\"name\"" space ":" space
  ("\"get_weather\"") "}" space
arguments ::= "{" space "\"city\"" space ":" space string "}" space
string ::= "\"" ([^"\\] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]))*
  "\"" space
space ::= " "?
"""


@pytest.mark.parametrize(
    "choice", ['"auto"', '"required"', '{"type": "function", "function": {"name": "required"}}']
)
def test_strict_tools_are_called_in_the_model_s_own_format(served: Backend, choice: str) -> None:
    """LocalAI makes a grammar of its own for them, in a format that no model has learned."""
    strict: dict[str, Any] = copy.deepcopy(WEATHER)
    strict["function"]["strict"] = True
    request = chat(
        "What is the weather in Paris?",
        Tools=json.dumps([strict]),
        ToolChoice=choice,
        Grammar=LOCALAI_CALL,
    )
    whole = unary(_reply_to(served, request), tools=True)
    pieces = streamed(served.stub.PredictStream(request, timeout=WAIT), tools=True)
    for seen in (whole, pieces):
        assert [(name, json.loads(args)) for name, args in seen.calls] == [
            ("get_weather", {"city": "Paris"})
        ]
        assert seen.content == ""
