"""What was said so far, and the request that it makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from terminal.client import Piece

Message = dict[str, Any]


@dataclass
class Answer:
    """An answer as it comes in."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: int | None = None

    def add(self, piece: Piece) -> None:
        """Take the next piece."""
        self.content += piece.content
        self.reasoning += piece.reasoning
        for part in piece.calls:
            while len(self.calls) <= part.index:
                blank = {"name": "", "arguments": ""}
                self.calls.append({"id": "", "type": "function", "function": blank})
            call = self.calls[part.index]
            call["id"] = call["id"] or part.id
            call["function"]["name"] = call["function"]["name"] or part.name
            call["function"]["arguments"] += part.arguments
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.tokens = piece.tokens if piece.tokens is not None else self.tokens

    @property
    def empty(self) -> bool:
        return not (self.content or self.reasoning or self.calls)


@dataclass
class Conversation:
    """The turns, the settings, and the images that go with the next question."""

    model: str
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # data URIs
    messages: list[Message] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """Add a question, with the images that wait for it.

        One that got no answer is forgotten: it may be what was refused.
        """
        if self._open:
            self.take_back_question()
        parts: list[Message] = [
            {"type": "image_url", "image_url": {"url": image}} for image in self.images
        ]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        self.images = []
        self.messages.append({"role": "user", "content": content})

    def take(self, answer: Answer) -> None:
        """Add an answer, unless there is none."""
        if answer.empty:
            return
        message: Message = {"role": "assistant", "content": answer.content}
        if answer.calls:
            message |= {"content": answer.content or None, "tool_calls": answer.calls}
            if answer.reasoning:
                message["reasoning_content"] = answer.reasoning
        self.messages.append(message)

    def result(self, call: dict[str, Any], text: str) -> None:
        """Add what a tool answered."""
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    def take_back_answer(self) -> bool:
        """Forget all that followed the last question; False where there was none."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        return bool(self.messages)

    def take_back_question(self) -> None:
        """Forget the last question and all that followed."""
        if self.take_back_answer():
            self.messages.pop()

    @property
    def _open(self) -> bool:
        last = self.messages[-1] if self.messages else {"role": "assistant"}
        return last["role"] != "assistant" or "tool_calls" in last

    def request(self) -> dict[str, Any]:
        """The body of the next chat completion."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": [*system, *self.messages]} | self.settings
        return body | ({"tools": self.tools} if self.tools else {})
