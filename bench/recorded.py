"""Generated conversations of an agent; the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from wire import backend_pb2 as pb

_VERBS = "read list build check move open trace split join write".split()
_NOUNS = "parser cache queue server table index buffer route clock socket".split()
TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Runs {name} and shows what came of it.",
                "parameters": {
                    "type": "object",
                    "properties": {"path": {"type": "string"}},
                    "required": ["path"],
                },
            },
        }
        for name in ("read_file", "run_tests", "apply_patch")
    ]
)


def prompts(seed: int, turns: int) -> Iterator[list[pb.Message]]:
    """Yield the messages of each request: questions, tool loops with reasoning, edits.

    Every fifth request follows an edit: the last message is replaced, and every second time the
    exchange before it is removed. Reasoning is included; a template may drop it.
    """
    dice = random.Random(seed)
    messages = [pb.Message(role="system", content=_words(dice, 250))]
    messages.append(pb.Message(role="user", content=_words(dice, 60)))
    yield messages
    calls = 0
    for turn in range(2, turns + 1):
        if turn % 10 == 0:
            messages = messages[:-2]
        if turn % 5 == 0:
            edited = pb.Message()
            edited.MergeFrom(messages[-1])
            edited.content = _words(dice, 80)
            messages = [*messages[:-1], edited]
        elif dice.random() < 0.7:
            calls += 1
            messages = [*messages, *_step(dice, f"call{calls:05}")]
        else:
            answer = pb.Message(
                role="assistant",
                content=_words(dice, 60),
                reasoning_content=_words(dice, 40),
            )
            messages = [*messages, answer, pb.Message(role="user", content=_words(dice, 60))]
        yield messages


def _step(dice: random.Random, call: str) -> Iterator[pb.Message]:
    """Yield the messages of one agent step: reasoning with a call, and the tool's result."""
    name = dice.choice(("read_file", "run_tests", "apply_patch"))
    arguments = json.dumps({"path": f"{dice.choice(_NOUNS)}/{dice.choice(_VERBS)}.py"})
    function = {"name": name, "arguments": arguments}
    yield pb.Message(
        role="assistant",
        reasoning_content=_words(dice, 30),
        tool_calls=json.dumps([{"id": call, "type": "function", "function": function}]),
    )
    result = _words(dice, dice.randrange(40, 160))
    yield pb.Message(role="tool", name=name, tool_call_id=call, content=result)


def _words(dice: random.Random, count: int) -> str:
    return " ".join(
        f"{dice.choice(_VERBS)} the {dice.choice(_NOUNS)} {dice.randrange(1000)}"
        for _ in range(count // 4)
    )
