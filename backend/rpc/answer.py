"""One answer on its way out: text pieces in, chat events out.

Only an answer to Messages is parsed. A raw prompt is continued as it is: its host renders and
reads the template's markers itself (contract 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.engine import ModelFacts
from backend.engine.events import Event, Finished, FinishReason
from backend.engine.generation import Generation
from backend.engine.request import ChatPrompt, RawPrompt
from backend.rpc import logprobs
from common.chat_events import ChatEvent, Content
from common.chat_parser import ChatParser


class Answer:
    """The parser of one generation; it starts with the first piece, when the prompt is known."""

    def __init__(
        self, facts: ModelFacts, prompt: RawPrompt | ChatPrompt, generation: Generation
    ) -> None:
        self._format = facts.chat_format
        self._token_bytes = facts.token_bytes
        self._prompt = prompt
        self._generation = generation
        self._parser: ChatParser | None = None

    def feed(self, text: str) -> Sequence[ChatEvent]:
        """The next piece of text."""
        parser = self._started()
        return [Content(text)] if parser is None else parser.feed(text)

    def finish(self, reason: FinishReason) -> Sequence[ChatEvent]:
        """The end of the text."""
        parser = self._started()
        return [] if parser is None else parser.finish(reason)

    def logprobs(self, event: Event) -> bytes:
        """Those of the whole answer, with its last event, if they were asked for."""
        if not isinstance(event, Finished) or event.logprobs is None:
            return b""
        return logprobs.as_json(event.logprobs, self._token_bytes)

    def _started(self) -> ChatParser | None:
        if isinstance(self._prompt, RawPrompt):
            return None
        if self._parser is None:
            self._parser = ChatParser(
                self._format,
                tools=self._prompt.tools or (),
                prompt_tail=self._generation.prompt_tail,
            )
        return self._parser
