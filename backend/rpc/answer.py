"""Turns the text of one answer into chat events and log-probabilities.

Only an answer to Messages is parsed. The answer to a raw prompt is passed on unchanged, because the
host that rendered the prompt also interprets the markers in the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from backend.engine.engine import Engine
from backend.engine.events import Finished, Progress, TextDelta, TokenLogprob
from backend.engine.generation import Generation
from backend.engine.request import ChatPrompt, GenerationRequest
from backend.engine.served_model import ServedModel
from backend.rpc import replies
from backend.rpc.call_log import note, note_usage
from backend.rpc.requests import generation_request
from common.chat_events import ChatEvent, Content, Reasoning, merged
from common.chat_parser import ChatParser
from wire import backend_pb2 as pb


class Answer:
    """The answer of one generation. Its parser is created with the first piece of text.

    partial_calls: whether calls are reported while they are generated, for streams.
    """

    def __init__(
        self,
        served: ServedModel,
        request: GenerationRequest,
        generation: Generation,
        *,
        partial_calls: bool,
    ) -> None:
        self._facts = served
        self._request = request
        self._generation = generation
        self._partial_calls = partial_calls
        self._parser: ChatParser | None = None
        self._unsent: list[TokenLogprob] = []
        self._sent = 0
        self._thought = _ReasoningTokens()

    @classmethod
    def to(
        cls,
        engine: Engine,
        options: pb.PredictOptions,
        served: ServedModel,
        *,
        partial_calls: bool = False,
    ) -> Answer:
        """Submit a request, and return its answer. Raises InvalidRequest, Overloaded, …."""
        request = generation_request(options, served)
        note(id=request.request_id)
        return cls(served, request, engine.submit(request), partial_calls=partial_calls)

    async def events(
        self,
    ) -> AsyncGenerator[tuple[Progress | TextDelta | Finished, Sequence[ChatEvent]], None]:
        """Yield the engine's events with the chat events of each, and note them for the call's log.

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
        if isinstance(event, Finished):
            note(finish=event.reason)
            return self.finish(event)
        return self.feed(event)

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far; 0 for a raw prompt, whose answer is not parsed."""
        return self._thought.total

    def feed(self, piece: TextDelta) -> Sequence[ChatEvent]:
        self._unsent += piece.logprobs
        parser = self._started()
        if parser is None:
            return [Content(piece.text)]
        read: list[ChatEvent] = []
        for text, tokens in piece.pieces:
            events = parser.feed(text)
            self._thought.add(events, tokens)
            read += events
        return merged(read)

    def finish(self, end: Finished) -> Sequence[ChatEvent]:
        parser = self._started()
        cut = end.cut and not (parser and parser.ends_with(end.stop_sequence))
        events = [] if parser is None else parser.finish("length" if cut else end.reason)
        self._thought.add(events, end.usage.completion_tokens)
        return events

    def piece_logprobs(self) -> bytes:
        """Return the log-probabilities of the tokens since the previous Reply, if requested.

        Those of tokens without visible text (markup, or withheld text) go into the next Reply.
        """
        if not self._request.stream_logprobs or not self._unsent:
            return b""
        entries, self._unsent = self._unsent, []
        self._sent += len(entries)
        return replies.logprobs_json(entries, self._facts.token_bytes)

    async def last_logprobs(self, end: Finished) -> bytes:
        """Return the log-probabilities that were not streamed yet, and those of the prompt."""
        rest = (end.logprobs or ())[self._sent :]
        if end.prompt_logprobs is not None:
            # Formatting a long prompt takes a second, which would block the event loop.
            return await asyncio.to_thread(
                replies.logprobs_json,
                rest,
                self._facts.token_bytes,
                end.prompt_logprobs,
                self._facts.new_text(False),
            )
        if end.logprobs is None or (self._sent and not rest):
            return b""
        return replies.logprobs_json(rest, self._facts.token_bytes)

    def _started(self) -> ChatParser | None:
        prompt = self._request.prompt
        if not isinstance(prompt, ChatPrompt):
            return None
        if self._parser is None:
            self._parser = self._facts.parser(
                prompt, self._generation.prompt_tail, partial_calls=self._partial_calls
            )
        return self._parser


class _ReasoningTokens:
    """Counts reasoning tokens, however the answer was divided into Replies.

    A token without an event is markup, or its text is withheld until more text arrives. Such a
    token counts as the same kind, reasoning or content, as the text that follows.
    """

    def __init__(self) -> None:
        self.total = 0
        self._placed = 0

    def add(self, events: Sequence[ChatEvent], tokens: int) -> None:
        """Add the events that became known when the answer had `tokens` tokens."""
        if not events:
            return
        if any(isinstance(event, Reasoning) for event in events):
            self.total += tokens - self._placed
        self._placed = tokens
