"""The half of a loaded model that lies outside the engine thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend.engine.embedding.kind import ModelKind
from backend.engine.request import ChatPrompt, Extras
from backend.engine.token_text import TextStream
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser

if TYPE_CHECKING:
    from backend.engine.constraints.compiler import ConstraintCompiler
    from backend.engine.disk_cache.cache import DiskCache
    from backend.engine.embedding.readers import Reader
    from backend.engine.prompts import PromptBuilder


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are read, prepared and answered with. No MLX object is in reach from here.

    chat_format: how answers are read. call_format: how they are where tools are offered, if those
    are read in another way. vocabulary_size: width of the logits. token_bytes: what a token
    writes. new_text: a decoder of tokens; the argument says whether its text continues an
    earlier one. kind: what the model answers. media: which of image, video and audio it takes;
    media_marker: where they go in a raw prompt.
    epoch: the number of the load. capacity: requests that may be running or waiting.
    default_max_tokens: for requests that set no limit; 0 means up to the end of the context.
    template_words: which of `REASONING_WORDS` the chat template knows.
    step_timeout: seconds. constraints: for models that generate text. reader: what the model
    answers besides generating. division: how ranks divide it, in words; "" where none do.
    """

    name: str
    model_type: str
    context_size: int
    chat_template: str | None
    chat_format: ChatFormat
    rendered_template: str
    vocabulary_size: int
    token_bytes: Callable[[int], bytes]
    new_text: Callable[[bool], TextStream]
    prompts: PromptBuilder
    capacity: int
    step_timeout: int
    weights_bytes: int
    epoch: int
    defaults: Extras = field(default_factory=Extras)
    kind: ModelKind = ModelKind.TEXT
    media: frozenset[str] = frozenset()
    media_marker: str = ""
    call_format: ChatFormat | None = None
    template_words: frozenset[str] = frozenset()
    default_max_tokens: int = 0
    constraints: ConstraintCompiler | None = None
    disk: DiskCache | None = None
    reader: Reader | None = None
    division: str = ""

    def parser(
        self, prompt: ChatPrompt, prompt_tail: str, *, partial_calls: bool = False
    ) -> ChatParser:
        """What reads an answer to the prompt, whose text ends in `prompt_tail`."""
        return ChatParser(
            self.format_of(tools=bool(prompt.tools)),
            tools=prompt.tools or (),
            prompt_tail=prompt_tail,
            begun=prompt.messages[-1]["content"] if prompt.continues else "",
            partial_calls=partial_calls,
        )

    def format_of(self, *, tools: bool) -> ChatFormat:
        """How an answer is read, with tools offered or without."""
        return self.call_format or self.chat_format if tools else self.chat_format
