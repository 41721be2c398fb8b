"""Turns the text of one answer into chat events and log-probabilities.

Only an answer to Messages is parsed. The answer to a raw prompt is passed on unchanged, because the
host that rendered the prompt also interprets the markers in the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from backend.engine.engine import Engine
from backend.engine.events import Finished, Progress, TextDelta, TokenLogprob
from backend.engine.request import ChatPrompt
from backend.engine.served_model import ServedModel
from backend.rpc import replies
from backend.rpc.call_log import note, note_usage
from backend.rpc.requests import generation_request
from common.chat_events import ChatEvent, Content, Reasoning, merged
from wire import backend_pb2 as pb

if TYPE_CHECKING:
    from common.chat_parser import ChatParser


class Answer:
    """The answer to one request, which is submitted to the engine.

    partial_calls: whether calls are reported while they are generated, for streams.

    Raises InvalidRequest, Overloaded and other errors of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        options: pb.PredictOptions,
        served: ServedModel,
        *,
        partial_calls: bool = False,
    ) -> None:
        self._served = served
        self._request = generation_request(options, served)
        note(id=self._request.request_id)
        self._generation = engine.submit(self._request)
        self._partial_calls = partial_calls
        self._parser: ChatParser | None = None  # created with the first text of a chat
        self._unsent: list[TokenLogprob] = []
        self._sent = 0
        self.reasoning_tokens = 0  # so far; 0 for a raw prompt, whose answer is not parsed
        self._counted = 0  # tokens that were found to be reasoning or content

    async def events(
        self,
    ) -> AsyncGenerator[tuple[Progress | TextDelta | Finished, Sequence[ChatEvent]], None]:
        """Yield the engine's events, each with its chat events, and note usage for the log.

        Closing the iterator cancels the generation.
        """
        async with self._generation:
            async for event in self._generation:
                if isinstance(event, Progress):
                    yield event, ()
                elif isinstance(event, TextDelta | Finished):
                    note_usage(event.usage)
                    yield event, self._read(event)

    def _read(self, event: TextDelta | Finished) -> Sequence[ChatEvent]:
        parser = self._started()
        if isinstance(event, Finished):
            note(finish=event.reason)
            cut = event.cut and not (parser and parser.ends_with(event.stop_sequence))
            events = [] if parser is None else parser.finish("length" if cut else event.reason)
            self._count(events, event.usage.completion_tokens)
            return events
        self._unsent += event.logprobs
        if parser is None:
            return [Content(event.text)]
        read: list[ChatEvent] = []
        for text, tokens in event.pieces:
            events = parser.feed(text)
            self._count(events, tokens)
            read += events
        return merged(read)

    def _count(self, events: Sequence[ChatEvent], tokens: int) -> None:
        """Count reasoning tokens, by the events that were read from the first `tokens` tokens.

        A token without an event is markup, or its text is withheld until more text arrives. Such a
        token counts as reasoning or content like the text that follows.
        """
        if events:
            if any(isinstance(event, Reasoning) for event in events):
                self.reasoning_tokens += tokens - self._counted
            self._counted = tokens

    def piece_logprobs(self) -> bytes:
        """Return the log-probabilities of the tokens since the previous Reply, if requested.

        Those of tokens without visible text (markup, or withheld text) go into the next Reply.
        """
        if not self._request.stream_logprobs or not self._unsent:
            return b""
        entries, self._unsent = self._unsent, []
        self._sent += len(entries)
        return replies.logprobs_json(entries, self._served.token_bytes)

    async def last_logprobs(self, end: Finished) -> bytes:
        """Return the log-probabilities that were not streamed yet, and those of the prompt."""
        rest = (end.logprobs or ())[self._sent :]
        if end.prompt_logprobs is not None:
            # Formatting a long prompt takes a second, which would block the event loop.
            return await asyncio.to_thread(
                replies.logprobs_json,
                rest,
                self._served.token_bytes,
                end.prompt_logprobs,
                self._served.new_text(False),
            )
        if end.logprobs is None or (self._sent and not rest):
            return b""
        return replies.logprobs_json(rest, self._served.token_bytes)

    def _started(self) -> ChatParser | None:
        prompt = self._request.prompt
        if not isinstance(prompt, ChatPrompt):
            return None
        if self._parser is None:
            self._parser = self._served.parser(
                prompt, self._generation.prompt_tail, partial_calls=self._partial_calls
            )
        return self._parser
