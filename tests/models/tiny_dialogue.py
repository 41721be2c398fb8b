"""One conversation with the expected answer, and the source of its words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.models import tiny_words as words

Message = dict[str, Any]


@dataclass(frozen=True)
class Words:
    """The source of cities and names, and how much clutter surrounds a question."""

    city: Callable[[random.Random], str] = words.city
    name: Callable[[random.Random], str] = words.name
    clutter: float = 1.0


@dataclass
class Dialogue:
    """A conversation before the answer, and the expected answer."""

    kind: str
    messages: list[Message]
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    tools: list[Message] = field(default_factory=list)
    thinking: bool = True
    endless: bool = False
    filler: str = ""

    @property
    def answer(self) -> str:
        """The text that follows the generation prompt, without the end of the turn."""
        blocks = [
            f'<tool_call>\n{{"name": "{name}", "arguments": '
            f"{json.dumps({'city': city}, ensure_ascii=False)}}}\n</tool_call>"
            for name, city in self.calls
        ]
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self._thinks else ""
        return thought + "\n".join([self.content, *blocks] if self.content else blocks)

    @property
    def _thinks(self) -> bool:
        return self.thinking and bool(self.reasoning)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def ask(kind: str, question: str, content: str, reasoning: str = "") -> Dialogue:
    return Dialogue(kind, [user(question)], content, reasoning)
