"""The part of a loaded model that the event loop and the prompt threads use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from backend.engine.heartbeat import StepTimeout
from backend.engine.load_request import LoadRequest
from backend.engine.media.limits import MediaLimits
from backend.engine.request import ChatPrompt, Extras
from backend.engine.speech.transcript import SpeechAbilities
from common.model_kind import ModelKind

if TYPE_CHECKING:
    from backend.engine.constraints.compiler import ConstraintCompiler
    from backend.engine.disk_cache.cache import DiskCache
    from backend.engine.embedding.readers import Reader
    from backend.engine.prompting.prompts import PromptBuilder
    from backend.engine.token_text import TextStream
    from common.chat_format import ChatFormat
    from common.chat_parser import ChatParser


def _plain_format() -> ChatFormat:
    from common.chat_format import ChatFormat

    return ChatFormat.named("plain")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The data for validating, preparing and answering requests, without any MLX object.

    call_format: the format of answers to requests with tools, if it differs.
    context_reason: why the context is shorter than the model's own; '' if it is not.
    vocabulary_size: number of logits.
    token_bytes: returns the bytes of a token.
    new_text: creates a text decoder; its argument is whether the text continues earlier text.
    media: which of image, video and audio the model accepts.
    reads_whole: whether all tokens of a prompt attend to each other.
    media_marker: the marker for media in a raw prompt.
    epoch: the number of the load.
    capacity: maximum number of running and waiting requests.
    default_max_tokens: for requests that set no limit; 0 means up to the end of the context.
    template_words: the `REASONING_WORDS` that the chat template uses.
    constraints: compiles constraints, for models that generate text.
    adapters: the numbers of the adapters of which a request may choose one, by name.
    reader: prepares requests that are not generations.
    division: how ranks divide the model, for logs; '' if they do not.
    request: the request that loaded the model, if another request may change its adapters.
    """

    name: str
    model_type: str
    context_size: int
    vocabulary_size: int
    token_bytes: Callable[[int], bytes]
    new_text: Callable[[bool], TextStream]
    prompts: PromptBuilder
    capacity: int
    step_timeout: StepTimeout
    weights_bytes: int
    epoch: int
    chat_template: str | None = None
    chat_format: ChatFormat = field(default_factory=_plain_format)
    rendered_template: str = ""
    defaults: Extras = field(default_factory=Extras)
    kind: ModelKind = ModelKind.TEXT
    media: frozenset[str] = frozenset()
    reads_whole: bool = False
    media_marker: str = ""
    call_format: ChatFormat | None = None
    template_words: frozenset[str] = frozenset()
    default_max_tokens: int = 0
    constraints: ConstraintCompiler | None = None
    disk: DiskCache | None = None
    reader: Reader | None = None
    adapters: Mapping[str, int] = field(default_factory=dict)
    speech: SpeechAbilities | None = None
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    context_reason: str = ""
    division: str = ""
    request: LoadRequest | None = None

    @property
    def public_name(self) -> str:
        """The name for messages, which end users read: only the last part of an absolute path."""
        return Path(self.name).name if Path(self.name).is_absolute() else self.name

    def parser(
        self, prompt: ChatPrompt, prompt_tail: str, *, partial_calls: bool = False
    ) -> ChatParser:
        """Return a parser for the answer to a prompt whose text ends with `prompt_tail`."""
        from common.chat_parser import ChatParser

        return ChatParser(
            self.format_of(tools=bool(prompt.tools)),
            tools=prompt.tools or (),
            prompt_tail=prompt_tail,
            begun=prompt.messages[-1]["content"] if prompt.continues else "",
            partial_calls=partial_calls,
        )

    def format_of(self, *, tools: bool) -> ChatFormat:
        """Return the format of answers to requests with or without tools."""
        return self.call_format or self.chat_format if tools else self.chat_format
