"""Prompts to tokens: the chat template, the BOS rule, the limit of the context.

Runs on its own threads, off the event loop and off the engine thread: rendering and tokenising a
long prompt may take seconds.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from backend.engine.control_tokens import ControlTokens
from backend.engine.errors import InvalidRequest, PromptTooLong
from backend.engine.infill import infill_of
from backend.engine.prompt_places import TokenPlaces, continuations, shared_text
from backend.engine.quoted_text import QuotedText
from backend.engine.request import (
    Attachments,
    ChatPrompt,
    InfillPrompt,
    Prompt,
    RawPrompt,
    TokenPrompt,
)
from backend.engine.template_limits import CostlyTemplate
from backend.engine.vision.media_plan import MediaItem, MediaPlan, grown, spliced
from common.tool_text import in_words, speaks_of_calls

if TYPE_CHECKING:
    from backend.engine.tool_support import ToolSupport
    from backend.engine.vision.media_prompts import MediaPrompts, Shown

_log = logging.getLogger(__name__)

REASONING_WORDS: Mapping[str, Sequence[Any]] = {
    "reasoning_effort": ("low", "high"),
    "thinking_budget": (512, 4096),
}
"""Variables by which templates tell a model how much to think, with values that differ."""
_SAMPLE = ({"role": "user", "content": "Hello"},)
_MOST_LOGPROBS = (
    1 << 18
)  # log-probabilities: some 25 MB of JSON; a message of the wire holds 50 MiB
_COUNTED_CONTEXTS = 16  # as many are counted of a prompt that is not to be read
_TAIL = 512  # characters of the prompt's end that tell what the model goes on with
# No text that travels has Unicode's noncharacters, and no client knows the number.
_END = f"\ufdee{secrets.token_hex(16)}\ufdee"
# Templates in Python assert what messages must have, and raise NotImplementedError for roles.
_TEMPLATE_FAULTS = (
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    IndexError,
    AssertionError,
    NotImplementedError,
)
_UNKNOWN_ARGUMENT = re.compile(r"unexpected keyword argument '(\w+)'")


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt in tokens, and the end of its text: it tells whether reasoning has begun.

    media: the images and sounds among the tokens, where there are any. places: lengths that later
    prompts are likely to share, the likeliest first, where the model has to know of them.
    """

    tokens: list[int]
    tail: str
    media: MediaPlan | None = None
    places: tuple[int, ...] = ()


def require_tellable(tokens: int, alternatives: int) -> None:
    """Raise InvalidRequest where the prompt's log-probabilities would not fit an answer."""
    entries = tokens * (1 + alternatives)
    if entries > _MOST_LOGPROBS:
        raise InvalidRequest(
            f"{tokens} prompt tokens with {alternatives} alternatives each are {entries}"
            f" log-probabilities, but at most {_MOST_LOGPROBS} are returned: shorten the prompt, or"
            " send a smaller TopLogprobs",
            "TopLogprobs",
        )


def _open_ended(messages: tuple[Mapping[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
    """The messages with a mark where the text of the last one ends."""
    last = messages[-1]
    return (*messages[:-1], {**last, "content": f"{last['content']}{_END}"})


def _up_to_the_end(rendered: str) -> str:
    """What the template writes before the mark. Raises InvalidRequest."""
    text, mark, _ = rendered.rpartition(_END)
    if not mark:
        raise InvalidRequest(
            "the model's chat template does not show the end of the last message, so it cannot be"
            " continued"
        )
    return text.replace(_END, "")


class CostlyPrompt(InvalidRequest):
    """The chat template takes more time or memory than a prompt may."""


class PromptBuilder:
    """Turns prompts into token ids for one loaded model.

    tokenizer: mlx-lm's TokenizerWrapper. context_size: tokens of prompt and output together.
    model_vocabulary: ids that the model has; a tokenizer may know more. trims: whether the model's
    caches can be cut back to any length; for others, prompts are built with their `places`. media:
    what puts images and sounds into prompts, where the model takes any (`take_media`).
    """

    def __init__(
        self, tokenizer: Any, context_size: int, model_vocabulary: int, *, trims: bool = True
    ) -> None:
        self._trims = trims
        self._media: MediaPrompts | None = None
        self._support: ToolSupport | None = None
        self._model_vocabulary = model_vocabulary
        self._tokenizer = tokenizer
        self._context_size = context_size
        self._vocabulary_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        bos = tokenizer.bos_token_id
        self._adds_bos = bos is not None and tokenizer.encode("a")[:1] == [bos]
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._control = ControlTokens(
            tokenizer.added_tokens_decoder
            if backend is None
            else backend.get_added_tokens_decoder()
        )
        self._quoted = QuotedText(self._control, backend, self.tokenize)
        self._longest_piece = max(map(len, tokenizer.get_vocab()), default=1)
        self.infill = infill_of(tokenizer.get_vocab())

    @property
    def control(self) -> ControlTokens:
        """The control strings of the tokenizer."""
        return self._control

    def take_media(self, media: MediaPrompts) -> None:
        """From now on prompts may have images and sounds."""
        self._media = media

    def write_tools(self, support: ToolSupport) -> None:
        """From now on tools and calls are written in words, where the template shows none."""
        self._support = support

    def build(
        self,
        prompt: Prompt,
        attachments: Attachments | None = None,
        *,
        counted: bool = False,
    ) -> BuiltPrompt:
        """The whole prompt in tokens. Raises InvalidRequest.

        counted: it is only to be counted, so it need not fit the context.
        """
        most = self._context_size * (_COUNTED_CONTEXTS if counted else 1)
        shown: list[Shown] = []
        items: list[MediaItem] = []
        places: tuple[int, ...] = ()
        seen = _TAIL
        if attachments is not None:
            assert self._media is not None, "whoever takes the request knows the model"
            shown = self._media.items(attachments)
        if isinstance(prompt, TokenPrompt):
            text, tokens = "", list(prompt.tokens)
        elif isinstance(prompt, InfillPrompt):
            text, tokens = "", self._filled_in(prompt, most)
        elif isinstance(prompt, RawPrompt):
            text = prompt.text
            if shown and self._media is not None:
                items = list(chain.from_iterable(shown))
                text = self._media.surrounded(self._media.marked(text, shown), items)
            bos = self._tokenizer.bos_token
            self._require_short(text, most)
            tokens = self._encode(text, special=not (bos and text.startswith(bos)))
        else:
            # A template writes its own BOS; adding the tokenizer's would double it.
            quoted = self._control.quote(prompt.messages)
            messages = _open_ended(quoted.messages) if prompt.continues else quoted.messages
            if self._media is not None:
                given = attachments or Attachments()
                messages, items = self._media.attach(messages, given, shown)
            # Media are placed by the indices of the messages as they came.
            attached = replace(prompt, messages=messages)
            marked = self.render(self._in_words(attached))
            if prompt.continues:
                marked = _up_to_the_end(marked)
                seen += len(str(prompt.messages[-1]["content"]))
            if items and self._media is not None:
                marked = self._media.surrounded(marked, items)
            self._require_short(marked, most)
            text = marked.replace(quoted.mark, "") if quoted.mark else marked
            if text == marked:
                tokens = self._encode(text, special=False)
            else:
                tokens = self._quoted.tokenize(marked, quoted.mark)
            if not (self._trims or counted):
                cuts = self._cuts(attached, marked, items)
                places = TokenPlaces(marked, tokens, self._control.ids, self.tokenize).of(cuts)
        media = None
        if items and self._media is not None:
            markers = self._media.places(tokens, items)
            items = self._media.numbered(items)
            places = tuple(grown(place, markers, items) for place in places)
            tokens, spans = spliced(tokens, markers, items)
            media = MediaPlan(tokens, spans)
        if not tokens:
            raise InvalidRequest("the prompt is empty: it has no token")
        if len(tokens) >= most:
            raise self._too_long(f"{len(tokens)} tokens")
        self._require_known(tokens)
        if media is not None and media.spans[-1].stop == len(tokens):
            raise InvalidRequest(
                "the prompt ends with an image, a video or a sound: write text after it"
            )
        return BuiltPrompt(tokens, text[-seen:], media, places)

    def _filled_in(self, prompt: InfillPrompt, most: int) -> list[int]:
        if self.infill is None:
            raise InvalidRequest(
                "Metadata mlx.infill asks for the text between two others, but the tokenizer of the"
                " loaded model has no tokens for that: load a model such as Qwen2.5-Coder, or leave"
                " it out",
                "Metadata mlx.infill",
            )
        texts = (prompt.prefix, prompt.suffix, *(text for _, text in prompt.files))
        self._require_short("".join(texts), most)
        tokens = self.infill.tokens(prompt, self._quoted.literal)
        return [self._tokenizer.bos_token_id, *tokens] if self._adds_bos else tokens

    def _cuts(self, prompt: ChatPrompt, text: str, items: Sequence[MediaItem]) -> Iterator[int]:
        """How much of a rendered prompt each way to go on shares with it, in characters."""
        lists = self._media is not None and self._media.lists
        for messages in continuations(prompt.messages, lists=lists):
            try:
                # None of them is about to be answered, so none has the end that opens an answer.
                goes_on = replace(prompt, messages=messages, continues=True)
                other = self.render(self._in_words(goes_on))
            except InvalidRequest:
                continue
            if items and self._media is not None:
                other = self._media.surrounded(other, items)
            yield shared_text(text, other.replace(_END, ""))

    def render(self, prompt: ChatPrompt) -> str:
        """The chat template's text for these messages. Raises InvalidRequest."""
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                "Messages cannot be used with this model: it has no chat template; send Prompt",
                "Messages",
            )
        arguments: dict[str, Any] = dict(prompt.template_arguments)
        if prompt.tools is not None:
            arguments["tools"] = [dict(tool) for tool in prompt.tools]
        named = self._tokenizer.chat_template
        if isinstance(named, dict) and not named.keys() & {
            "default",
            *(("tool_use",) if prompt.tools is not None else ()),
        }:
            raise InvalidRequest(
                "Messages cannot be used with this model as they are: its chat templates are named"
                f" {', '.join(sorted(named))}, and none of them is the default; send Prompt"
                f"{', or Tools' if 'tool_use' in named else ''}",
                "Messages",
            )
        try:
            text = self._apply(prompt, arguments)
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                "Messages, Tools or the template's arguments hold half of a surrogate pair"
                " (\\ud800 to \\udfff), which is no character"
            ) from None
        except CostlyTemplate as cost:
            raise CostlyPrompt(f"the model's chat template is stopped: {cost}") from None
        except TemplateError as refusal:
            raise InvalidRequest(
                f"the model's chat template refused Messages: {refusal.message}"
            ) from None
        except _TEMPLATE_FAULTS as fault:
            raise InvalidRequest(
                f"the model's chat template cannot render Messages: {fault}"
            ) from None
        return text

    def _apply(self, prompt: ChatPrompt, arguments: dict[str, Any]) -> str:
        """Render; an argument that a template's own code does not know is left out, one at a time.

        Jinja ignores what it does not know. Templates in Python raise, and the tools are never
        what is left out.
        """
        while True:
            try:
                return str(
                    self._tokenizer.apply_chat_template(
                        [dict(message) for message in prompt.messages],
                        tokenize=False,
                        add_generation_prompt=not prompt.continues,
                        **arguments,
                    )
                )
            except TypeError as fault:
                unknown = _UNKNOWN_ARGUMENT.search(str(fault))
                if unknown is None or unknown[1] not in arguments or unknown[1] == "tools":
                    raise
                _log.warning("the chat template does not take %s: it is left out", unknown[1])
                del arguments[unknown[1]]

    def _in_words(self, prompt: ChatPrompt) -> ChatPrompt:
        """The prompt with what the template would not show of tools in its messages."""
        support = self._support
        if support is None or not (
            prompt.tools or (not support.calls and speaks_of_calls(prompt.messages))
        ):
            return prompt
        lists = self._media is not None and self._media.lists
        messages = in_words(prompt.messages, prompt.tools or (), system=support.system, lists=lists)
        return replace(prompt, messages=messages, tools=None)

    def sample(
        self,
        messages: tuple[Mapping[str, Any], ...] = _SAMPLE,
        tools: tuple[Mapping[str, Any], ...] | None = None,
    ) -> str:
        """A short conversation as the template renders it, or '' where it cannot.

        Raises CostlyPrompt: a template that takes too much for this can render nothing.
        """
        try:
            if self._media is not None:
                messages, _ = self._media.attach(messages, Attachments(), ())
            return self.render(ChatPrompt(messages, tools))
        except CostlyPrompt:
            raise
        except (InvalidRequest, RecursionError):
            return ""

    def known_words(self) -> frozenset[str]:
        """Which of `REASONING_WORDS` change what the template renders."""
        return frozenset(
            word for word, values in REASONING_WORDS.items() if self._tells_apart(word, values)
        )

    def _tells_apart(self, word: str, values: Sequence[Any]) -> bool:
        texts = set()
        for value in values:
            arguments = {"enable_thinking": True, word: value}
            try:
                texts.add(self.render(ChatPrompt(_SAMPLE, template_arguments=arguments)))
            except InvalidRequest:
                return False
        return len(texts) > 1

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text; special-token text is parsed, and nothing is added."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def detokenize(self, tokens: list[int]) -> str:
        """Text of token ids. Raises InvalidRequest."""
        for place, token in enumerate(tokens):
            if not 0 <= token < self._vocabulary_size:
                raise InvalidRequest(
                    f"tokens[{place}] is {token}, but the vocabulary ends at"
                    f" {self._vocabulary_size - 1}",
                    f"tokens[{place}]",
                )
        return str(self._tokenizer.decode(tokens))

    def encode_open(self, text: str) -> list[int]:
        """Tokens of a raw text that may go on: a BOS as `build` adds it, and no end of sequence."""
        self._require_short(text, self._context_size)
        tokens = self._encode(text, special=False)
        self._require_known(tokens)
        if not self._adds_bos or text.startswith(self._tokenizer.bos_token):
            return tokens
        return [self._tokenizer.bos_token_id, *tokens]

    def _require_known(self, tokens: list[int]) -> None:
        if (highest := max(tokens, default=0)) >= self._model_vocabulary:
            piece = self._tokenizer.convert_ids_to_tokens(highest)
            raise InvalidRequest(
                f"the prompt holds the token {piece!r} ({highest}), which the tokenizer knows and"
                f" the model does not: its vocabulary ends at {self._model_vocabulary - 1}"
            )

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=special)]

    def _require_short(self, text: str, most: int) -> None:
        # No token is longer than the longest piece of the vocabulary, so a text far beyond the
        # context is known to be too long without the minutes that tokenising it would take.
        at_least = len(text) // self._longest_piece
        if at_least >= most:
            raise self._too_long(f"at least {at_least} tokens")

    def _too_long(self, length: str) -> PromptTooLong:
        return PromptTooLong(
            f"the prompt has {length}, but the context holds {self._context_size} with at least"
            " one of output: shorten the prompt or load the model with a larger context_size"
        )
