"""The request of one generation: plain, validated, frozen data.

The servicer builds the request from the protocol's message; the engine reads it. The builder
(`backend.rpc.requests`) checks all ranges, so the engine never gets a value that a sampler cannot
use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.disk_cache.use import UNSET, DiskUse

WHOLE = 1 << 30  # a window larger than any context
MOST_DRAFT_TOKENS = 64  # draft tokens at a time, for one sequence
_NEVER_OPENS = 1 << 62


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """Text that the model continues; a BOS token is added only if the text has none.

    field_name: the field of PredictOptions that holds the prompt, here as in the other prompts.
    """

    text: str
    field_name: ClassVar[str] = "Prompt"
    continues: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A raw prompt in token ids; nothing is added."""

    tokens: tuple[int, ...]
    field_name: ClassVar[str] = "Metadata mlx.prompt_token_ids"
    continues: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """The text before and after a piece that is missing.

    files: names and texts of other files.
    """

    prefix: str
    suffix: str
    files: tuple[tuple[str, str], ...] = ()
    field_name: ClassVar[str] = "Metadata mlx.infill"
    continues: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's own chat template.

    messages: dictionaries in the form that templates expect (role, content, …).
    tools: the decoded JSON list of tools, or None.
    template_arguments: additional keyword arguments for the template (enable_thinking, …).
    continues: whether the answer continues the last message.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    field_name: ClassVar[str] = "Messages"


Prompt = RawPrompt | TokenPrompt | InfillPrompt | ChatPrompt
Position = int | tuple[int, ...]
"""Position of an image, audio or video: the index of its message in Messages, or a tuple of that
index, the number of characters of the message's text before the item, and a number that orders
items between the same two characters. Missing numbers are 0."""


@dataclass(frozen=True, slots=True)
class Attachments:
    """The images, audio and videos of a request, still encoded.

    image_messages, audio_messages, video_messages: the position of each item; None if the request
        has no positions.
    """

    images: tuple[str, ...] = ()
    audios: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    image_messages: tuple[Position, ...] | None = None
    audio_messages: tuple[Position, ...] | None = None
    video_messages: tuple[Position, ...] | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is sampled; the fields are in the order in which they apply.

    logit_bias: (token id, value added to its logit).
    repetition: llama.cpp's multiplicative penalty on tokens among the last `window` of prompt and
        output: positive logits are divided by it, others multiplied; 1 is off.
    window: number of recent tokens that `repetition` covers, at least 1; WHOLE covers all.
    frequency, presence: OpenAI's additive penalties, subtracted per occurrence and once per token
        that occurs in the output; 0 is off.
    frequency_window, presence_window: number of recent tokens of prompt and output that these two
        penalties cover, as in mlx-lm; 0: the whole output, and none of the prompt.
    temperature: 0 selects the best token, and then the fields below have no effect.
    top_k: 0 is off.
    typical_p, top_p: in (0, 1]; 1 is off.
    min_p: in [0, 1]; 0 is off.
    xtc_probability: probability per token, in [0, 1], that XTC runs: of all tokens with a
        probability of at least `xtc_threshold`, only the least likely remains; 0 is off.
    seed: 64 bits, on which alone the row's random stream depends.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    window: int = 64
    frequency: float = 0.0
    presence: float = 0.0
    frequency_window: int = 0
    presence_window: int = 0
    temperature: float = 0.0
    top_k: int = 0
    typical_p: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int = 0

    @property
    def remembers(self) -> bool:
        """Whether sampling depends on earlier tokens."""
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0


@dataclass(frozen=True, slots=True)
class Extras:
    """Settings without a field in the protocol. A model has defaults for the first six.

    Fields of the same name in `GenerationRequest`, `Sampling` and `Attachments` have the same
    meaning.

    grammar_type: how the text of a grammar is parsed; auto distinguishes JSON schemas from GBNF.
    thinking_budget: maximum tokens of reasoning; -1: no limit.
    grammar_or_calls: whether the model may call an offered tool instead of writing content that
        matches the grammar.
    stop_token_ids: tokens that end the answer.
    prompt_token_ids: the raw prompt in tokens; None: the prompt is text or messages.
    infill: the text after the missing piece, and other files; the text before is the raw prompt.
    prompt_logprobs: whether to return the log-probabilities of the prompt's tokens too.
    continue_final_message: whether the answer continues the last message.
    """

    min_tokens: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    grammar_type: str = "auto"
    parallel_tool_calls: bool = True
    thinking_budget: int = -1
    presence_window: int = 0
    frequency_window: int = 0
    grammar_or_calls: bool = False
    stream_logprobs: bool = False
    stream_progress: bool = False
    stop_token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None
    infill: InfillPrompt | None = None
    prompt_logprobs: bool = False
    prompt_only: bool = False
    count_only: bool = False
    continue_final_message: bool = False
    adapter: str = ""
    image_messages: tuple[Position, ...] | None = None
    audio_messages: tuple[Position, ...] | None = None
    video_messages: tuple[Position, ...] | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """The request of one generation.

    max_tokens: maximum number of tokens of the answer; None means up to the end of the context.
    stop: strings, not empty; the answer ends before the first of them that appears.
    min_tokens: number of tokens before which no end-of-sequence token can be sampled.
    ignore_eos: whether no end-of-sequence token can be sampled at all.
    stop_tokens: tokens that end the answer, from min_tokens on, and are not part of it.
    logprobs: how many alternatives to return with each token's log-probability; None: no
        log-probabilities.
    stream_logprobs: whether log-probabilities are sent with each piece of text.
    stream_progress: whether `Progress` is sent before the first text.
    prompt_logprobs: the same as `logprobs` for the tokens of the prompt.
    prompt_only: whether the prompt is prefilled and nothing is generated.
    count_only: whether only the prompt's tokens are counted, which may be more than fit.
    constraint: a grammar that the output must match.
    thinking_budget: maximum tokens of reasoning; None: no limit.
    n_draft: maximum number of draft tokens at a time, if the model drafts; None: the model's
        setting.
    disk: how the prompt cache on disk is used.
    adapter: the name of an adapter of the model; '' means none.
    attachments: media of the prompt; None if there are none, or once they are in the prompt.
    """

    request_id: str
    prompt: Prompt
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    stream_logprobs: bool = False
    stream_progress: bool = False
    prompt_logprobs: int | None = None
    prompt_only: bool = False
    count_only: bool = False
    constraint: ConstraintSpec | None = None
    thinking_budget: int | None = None
    n_draft: int | None = None
    disk: DiskUse = UNSET
    adapter: str = ""
    attachments: Attachments | None = None

    @property
    def end_opens_at(self) -> int:
        """How many tokens must be generated before the end of sequence can be sampled."""
        return _NEVER_OPENS if self.ignore_eos else self.min_tokens
