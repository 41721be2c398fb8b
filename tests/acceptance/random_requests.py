"""PredictOptions with random values in random fields, drawn from the descriptor."""

from __future__ import annotations

import json
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from wire import backend_pb2 as pb

_INTEGERS = (0, 1, -1, 2, -2, 5, 20, 21, 64, 511, 512, 4096, 2**31 - 1, -(2**31))
_FLOATS = (0.0, 1.0, -1.0, 0.5, 0.1, 1.5, 2.0, 100.0, 1e-9, 1e9, -0.0, float("nan"), float("inf"))
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_TEXTS = (
    "",
    " ",
    "hello",
    "你好🚀",
    "{}",
    "[]",
    "null",
    "{",
    '"auto"',
    '"required"',
    "none",
    '{"type":"function","function":{"name":"f"}}',
    json.dumps([_TOOL]),
    json.dumps(_SCHEMA),
    'root ::= "a" [0-9]+',
    "root ::= root",
    'root ::= ("a" | "b"){1,100000}',
    '{"type": "nonsense"}',
    "[" * 3000,
    '{"1": -100, "2": 3.5}',
    '{"99999": 1}',
    "x" * 5000,
    "\x00\x01",
    "/tmp/../etc/passwd",
    "http://127.0.0.1:1/",
)
_KEYS = (
    "enable_thinking",
    "reasoning_effort",
    "chat_template_kwargs",
    "mlx.min_tokens",
    "mlx.thinking_budget",
    "mlx.xtc_probability",
    "mlx.grammar_type",
    "mlx.grammar_or_calls",
    "mlx.stop_token_ids",
    "mlx.nothing",
    "user",
)


def random_request(dice: random.Random) -> pb.PredictOptions:
    """A request for a few tokens in which up to six fields have random values."""
    request = pb.PredictOptions(Prompt="Count to 5.", Tokens=dice.randrange(1, 12))
    if dice.random() < 0.5:
        request.UseTokenizerTemplate = True
        request.Messages.add(role="user", content="Count to 5.")
    fields: list[Any] = list(pb.PredictOptions.DESCRIPTOR.fields)
    for field in dice.sample(fields, dice.randrange(7)):
        if field.name != "ModelIdentity":
            _fill(request, field, dice)
    return request


def _fill(request: pb.PredictOptions, field: FieldDescriptor, dice: random.Random) -> None:
    if field.name == "Metadata":
        for key in dice.sample(_KEYS, 2):
            request.Metadata[key] = dice.choice((*_TEXTS, "true", "false", "0.5", "3"))
    elif field.name == "Messages":
        del request.Messages[:]
        for _ in range(dice.randrange(4)):
            request.Messages.add(
                **{
                    name: dice.choice(_TEXTS)
                    for name in ("content", "name", "tool_call_id", "reasoning_content")
                },
                role=dice.choice(("user", "assistant", "system", "tool", "")),
                tool_calls=dice.choice((*_TEXTS, "")),
            )
    elif field.is_repeated:
        getattr(request, field.name).extend(
            _value(field, dice) for _ in range(dice.choice((1, 2, 70)))
        )
    else:
        setattr(request, field.name, _value(field, dice))


def _value(field: FieldDescriptor, dice: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return dice.choice(_TEXTS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return dice.random() < 0.5
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return dice.choice(_FLOATS)
    return dice.choice(_INTEGERS)
