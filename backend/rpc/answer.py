"""Turns the text of one answer into chat events and log-probabilities.

Only an answer to Messages is parsed. The answer to a raw prompt is passed on unchanged, because the
host that rendered the prompt also interprets the markers in the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from backend.engine.events import Finished, TextDelta, TokenLogprob
from backend.engine.generation import Generation
from backend.engine.request import ChatPrompt, GenerationRequest
from backend.engine.served_model import ServedModel
from backend.rpc import replies
from common.chat_events import ChatEvent, Content, Reasoning, merged
from common.chat_parser import ChatParser


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
        events = [] if parser is None else parser.finish(end.reason)
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
