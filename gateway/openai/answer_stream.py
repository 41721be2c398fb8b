"""The stream of an OpenAI answer with one or several choices: chunks, usage, `[DONE]`.

A chunk is sent for every few letters of every stream, so writing one is the gateway's hot path: it
encodes one small object and uses no pydantic models. The text is ASCII, because some clients treat
U+2028 as the end of a line.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol

from gateway.generation import Done, Event, Piece, Progress
from gateway.openai.envelope import Json, usage_of
from gateway.sse import DONE

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Choice(Protocol):
    """One answer of the stream, as items of `choices`."""

    def begin(self) -> Sequence[Json]:
        """Return the items of the first chunks.

        None if they have been sent, or if there are none.
        """

    def chunks(self, event: Piece | Done) -> Iterable[Json]:
        """Return the items for an event."""

    def nothing(self) -> Json:
        """Return an item that adds nothing to the answer."""


class AnswerStream:
    """The chunks of one request, each with the fields of `head`.

    usage: the last chunk has the usage, and all others `"usage": null`, as OpenAI's do.
    per_prompt: how many choices in a row have the same prompt.
    progress: llama.cpp's `prompt_progress` is sent.
    """

    def __init__(
        self,
        head: Json,
        choices: Sequence[Choice],
        *,
        usage: bool,
        progress: bool,
        per_prompt: int,
    ) -> None:
        self._choices = choices
        self._usage = usage
        self._progress = progress
        self._per_prompt = per_prompt
        self._head = f"data: {_encode(head)[:-1]}"
        self._start = f'{self._head},"choices":['
        self._end = '],"usage":null}\n\n' if usage else "]}\n\n"

    async def chunks(
        self, events: AsyncGenerator[tuple[int, Event], None]
    ) -> AsyncGenerator[str, None]:
        """Yield the events of the stream.

        A failure is raised, because it is not a finish reason.
        """
        ends: dict[int, Done] = {}
        async with aclosing(events):
            async for index, event in events:
                choice = self._choices[index]
                if isinstance(event, Done):
                    ends[index] = event
                if begun := self._written(choice.begin()):
                    yield begun
                if not isinstance(event, Progress):
                    for entry in choice.chunks(event):
                        yield self._chunk(entry)
                elif self._progress:
                    yield self._reported(choice.nothing(), event)
        if self._usage:
            usages = [ends[index].usage for index in sorted(ends)]
            usage = _encode(usage_of(usages, self._per_prompt))
            yield f'{self._head},"choices":[],"usage":{usage}}}\n\n'
        yield DONE

    def beat(self) -> str:
        """Return an empty chunk, or the chunks that begin the choices."""
        begun = "".join(self._written(choice.begin()) for choice in self._choices)
        return begun or self._chunk(self._choices[0].nothing())

    def _written(self, entries: Iterable[Json]) -> str:
        return "".join(map(self._chunk, entries))

    def _chunk(self, entry: Json) -> str:
        return f"{self._start}{_encode(entry)}{self._end}"

    def _reported(self, entry: Json, progress: Progress) -> str:
        numbers = _encode(progress_of(progress))
        return f'{self._start}{_encode(entry)}],"prompt_progress":{numbers}}}\n\n'


def progress_of(progress: Progress) -> Json:
    """Return llama.cpp's `prompt_progress`."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(progress.ms),
    }
