"""One answer on its way out: text pieces in, chat events and log-probabilities out.

Only an answer to Messages is parsed. A raw prompt is continued as it is: its host renders and
reads the template's markers itself (contract 3.3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from backend.engine.events import Finished, TextDelta, TokenLogprob
from backend.engine.generation import Generation
from backend.engine.request import ChatPrompt, GenerationRequest
from backend.engine.served_model import ServedModel
from backend.rpc import logprobs
from backend.rpc.reasoning_tokens import ReasoningTokens
from common.chat_events import ChatEvent, Content, merged
from common.chat_parser import ChatParser


class Answer:
    """The parser of one generation; it starts with the first piece, when the prompt is known.

    partial_calls: the events are sent one by one, so calls may be shown while they are written.
    """

    def __init__(
        self,
        facts: ServedModel,
        request: GenerationRequest,
        generation: Generation,
        *,
        partial_calls: bool,
    ) -> None:
        self._facts = facts
        self._request = request
        self._generation = generation
        self._partial_calls = partial_calls
        self._parser: ChatParser | None = None
        self._unsent: list[TokenLogprob] = []
        self._sent = 0
        self._thought = ReasoningTokens()

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far; 0 for a raw prompt, which is not parsed."""
        return self._thought.total

    def feed(self, piece: TextDelta) -> Sequence[ChatEvent]:
        """The next piece of text."""
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
        """The end of the text."""
        parser = self._started()
        events = [] if parser is None else parser.finish(end.reason)
        self._thought.add(events, end.usage.completion_tokens)
        return events

    def piece_logprobs(self) -> bytes:
        """Those of the tokens since the Reply before, if a stream is to have them piece by piece.

        Tokens whose text is held back, or is markup, go with the next Reply that there is.
        """
        if not self._request.stream_logprobs or not self._unsent:
            return b""
        entries, self._unsent = self._unsent, []
        self._sent += len(entries)
        return logprobs.as_json(entries, self._facts.token_bytes)

    async def last_logprobs(self, end: Finished) -> bytes:
        """Those of the whole answer, less what has gone piece by piece, and those of the prompt."""
        rest = (end.logprobs or ())[self._sent :]
        if end.prompt_logprobs is not None:
            # A long prompt takes a second to write out, and other calls wait on this loop.
            return await asyncio.to_thread(
                logprobs.as_json,
                rest,
                self._facts.token_bytes,
                end.prompt_logprobs,
                self._facts.new_text(False),
            )
        if end.logprobs is None or (self._sent and not rest):
            return b""
        return logprobs.as_json(rest, self._facts.token_bytes)

    def _started(self) -> ChatParser | None:
        prompt = self._request.prompt
        if not isinstance(prompt, ChatPrompt):
            return None
        if self._parser is None:
            self._parser = self._facts.parser(
                prompt, self._generation.prompt_tail, partial_calls=self._partial_calls
            )
        return self._parser
