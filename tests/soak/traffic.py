"""The requests of a soak test: conversations with known answers, and all kinds of other requests.

The answers in a `Talk` depend only on its requests, so they can be compared with those of an idle
backend. All other requests are random, and only their expected status is known.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.acceptance.random_requests import random_request
from tests.engine.vision.seeing import encoded, picture
from wire import backend_pb2 as pb

CONTEXT = 2048
_MOST_DRAWN = 64  # output limit in tokens of a random request
_QUIET = {"enable_thinking": "false"}
_THINKING = {"enable_thinking": "true"}
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_TOOLS = json.dumps([_WEATHER])
_PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Talk:
    """The questions of one conversation, in order. fields: set in each of its requests."""

    questions: tuple[str, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def request(self, answers: Sequence[str]) -> pb.PredictOptions:
        """The question that comes after these answers."""
        asked = self.questions[: len(answers) + 1]
        messages = []
        for question, answer in zip_longest(asked, answers):
            messages.append(pb.Message(role="user", content=question))
            if answer is not None:
                messages.append(pb.Message(role="assistant", content=answer))
        return pb.PredictOptions(
            Messages=messages,
            UseTokenizerTemplate=True,
            **{"Metadata": _QUIET, "Tokens": 80, **self.fields},
        )


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint, and conversations with it."""

    path: Path
    talks: tuple[Talk, ...]


_TEXT_TALKS = (
    Talk(("What is the capital of France?", "Count to 9.", "What is 3 + 4?", "Say hello.")),
    Talk(("Count to 30.", "Count to 12.", "Say hello in Chinese.")),
    Talk(("What is 3 + 4?",), {"Metadata": _THINKING}),
    Talk(("What is the weather in Paris?",), {"Tools": _TOOLS}),
    Talk(("What is the capital of Spain?",), {"Tools": _TOOLS, "ToolChoice": '"required"'}),
    Talk(("Tell me about a cat.", "And about a dog."), {"Grammar": _PERSON}),
    Talk(("Say yes or no.",), {"Grammar": 'root ::= ("yes" | "no") "!"{1,3}'}),
    Talk(("Count to 20.",), {"Logprobs": 1, "TopLogprobs": 3}),
    Talk(("Count to 7. " * 120, "Count to 8."), {"Tokens": 24}),
    Talk(("Tell me a long story.",), {"Temperature": 0.9, "TopP": 0.95, "Seed": 5}),
    Talk(("Tell me a long story.",), {"Penalty": 1.2, "StopPrompts": ["sleep", "\n\n"]}),
)
_VISION_TALKS = (
    *(
        Talk(("What colour is the image?",), {"Images": [encoded(picture(colour))]})
        for colour in ("blue", "red", "green", "yellow")
    ),
    Talk(
        ("What colours are the images?",),
        {"Images": [encoded(picture("white")), encoded(picture("black"))]},
    ),
    Talk(("What is the capital of France?", "Count to 9.")),
    Talk(("What is the capital of France?",), {"Grammar": _PERSON}),
)
_BAD: tuple[Mapping[str, Any], ...] = (
    {"Prompt": ""},
    {"Prompt": "x", "TopP": -0.5},
    {"Prompt": "x", "Tokens": -2_000_000},
    {"Prompt": "x", "Grammar": "root ::= nowhere"},
    {
        "Messages": [pb.Message(role="user", content="Hello.")],
        "UseTokenizerTemplate": True,
        "Tools": "[",
    },
    {"Prompt": "x", "LogitBias": '{"x": -100}'},
    {"Prompt": "x", "Images": ["aGk="]},
    {"Prompt": "word " * 3 * CONTEXT},
)


def models(text: Path, vision: Path) -> tuple[Model, Model]:
    return Model(text, _TEXT_TALKS), Model(vision, _VISION_TALKS)


def endless(dice: random.Random) -> pb.PredictOptions:
    """A request that ends only when its context is full."""
    return pb.PredictOptions(Prompt=_words(dice, 20), IgnoreEOS=True)


def new(dice: random.Random) -> pb.PredictOptions:
    """A new question, so that nothing is cached."""
    return pb.PredictOptions(
        Messages=[pb.Message(role="user", content=_words(dice, dice.choice([5, 50, 200])))],
        UseTokenizerTemplate=True,
        Tokens=dice.choice([1, 20, 100]),
        Temperature=dice.choice([0.0, 1.0]),
        Seed=-1,
    )


def bad(dice: random.Random) -> pb.PredictOptions:
    return pb.PredictOptions(**dice.choice(_BAD))


def anything(dice: random.Random) -> pb.PredictOptions:
    request = random_request(dice)
    if not 0 < request.Tokens <= _MOST_DRAWN:
        request.Tokens = _MOST_DRAWN
    return request


def _words(dice: random.Random, count: int) -> str:
    return " ".join(f"word{dice.randrange(1_000)}" for _ in range(count))
