"""Turns prompts into tokens: chat template, BOS token, context limit.

This happens on prompt threads, because a long prompt may take seconds to render and tokenise.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError

from backend.engine.errors import TOO_DEEP, InvalidRequest, PromptTooLong
from backend.engine.prompting.control_tokens import ControlTokens
from backend.engine.prompting.infill import infill_of
from backend.engine.prompting.quoted_text import QuotedText, tokenizing
from backend.engine.prompting.roles import Roles, shows_instructions, without_halves
from backend.engine.prompting.template_limits import CostlyTemplate
from backend.engine.prompting.token_positions import TokenPositions, continuations
from backend.engine.request import (
    Attachments,
    ChatPrompt,
    InfillPrompt,
    Prompt,
    RawPrompt,
    TokenPrompt,
)
from backend.engine.vision.media_plan import MediaItem, MediaPlan, grown, spliced
from common.field_names import named, unmarked
from common.prefixes import common_prefix, position_of
from common.tool_text import (
    in_strict_turns,
    mentions_calls,
    with_single_calls,
    with_tools_as_text,
)

if TYPE_CHECKING:
    from backend.engine.prompting.chat_format import ToolSupport
    from backend.engine.vision.media_prompts import MediaPrompts, Shown

_log = logging.getLogger(__name__)

REASONING_WORDS: Mapping[str, Sequence[Any]] = {
    "reasoning_effort": ("low", "high"),
    "thinking_budget": (512, 4096),
}
"""Template variables that control reasoning, each with different values for a test."""
_SAMPLE = ({"role": "user", "content": "Hello"},)
_COUNTED_CONTEXTS = 16  # maximum length, in contexts, of a prompt whose tokens are only counted
_SHOWN = frozenset({"user", "tool"})
_TAIL = 512  # characters of the prompt's end that show which block the model continues
# Unicode's noncharacters do not occur in text, and no client knows the random number.
_END = f"\ufdee{secrets.token_hex(16)}\ufdee"
# Templates written in Python use assert, or raise NotImplementedError for unknown roles.
_TEMPLATE_FAULTS = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    AssertionError,
    RuntimeError,
)
_UNKNOWN_ARGUMENT = re.compile(r"unexpected keyword argument '(\w+)'")


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt in tokens."""

    tokens: list[int]
    # The end of the prompt's text, which shows whether the answer begins inside reasoning.
    tail: str
    media: MediaPlan | None = None  # the media among the tokens, if any
    # The checkpoint positions, for models that need snapshots: lengths of prefixes that later
    # prompts are likely to share, the likeliest first.
    positions: tuple[int, ...] = ()


def _open_ended(messages: tuple[Mapping[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
    """Return the messages with a mark at the end of the last message's text."""
    last = messages[-1]
    return (*messages[:-1], {**last, "content": f"{last['content']}{_END}"})


def _up_to_the_end(rendered: str) -> str:
    """Return the rendered text before the mark. Raises InvalidRequest if the mark is missing."""
    text, mark, _ = rendered.rpartition(_END)
    if not mark:
        raise InvalidRequest(
            "the last message cannot be continued, because the model's chat template does not show"
            f" its end: leave out {named('Metadata mlx.continue_final_message')}"
        )
    return text.replace(_END, "")


def _rearranged(messages: tuple[Mapping[str, Any], ...]) -> Iterator[tuple[Mapping[str, Any], ...]]:
    """Yield the messages in orders that strict templates accept, from the smallest change on."""
    yield in_strict_turns(messages)
    yield in_strict_turns(messages, system=False)
    single = with_single_calls(messages)
    yield single
    yield in_strict_turns(single)


class CostlyPrompt(InvalidRequest):
    """The chat template takes more time or memory than a prompt may."""


class BrokenTemplate(InvalidRequest):
    """The chat template is not valid Jinja."""


class PromptBuilder:
    """Turns prompts into token ids for a loaded model.

    tokenizer: mlx-lm's TokenizerWrapper.
    context_size: maximum number of tokens of prompt and output together.
    model_vocabulary: number of token ids of the model. A tokenizer may have more.
    trims: whether the model's caches can be truncated to any length; if not, prompts get
        `positions`.
    token_ids: the tokenizer's token ids by token; None to ask the tokenizer, which makes a new copy
        for each call.
    """

    def __init__(
        self,
        tokenizer: Any,
        context_size: int,
        model_vocabulary: int,
        *,
        trims: bool = True,
        token_ids: Mapping[str, int] | None = None,
    ) -> None:
        self._trims = trims
        self._media: MediaPrompts | None = None
        self._bos = ""  # the text with which the model's processor begins every prompt
        self._support: ToolSupport | None = None
        self._model_vocabulary = model_vocabulary
        self._tokenizer = tokenizer
        self._context_size = context_size
        vocabulary = tokenizer.get_vocab() if token_ids is None else token_ids
        self._vocabulary_size = max(vocabulary.values(), default=-1) + 1
        # The tokens that the tokenizer adds before a text. Some tokenizers also append EOS, after
        # which a model would not continue the text, so EOS is not used.
        bare = self.tokenize("a")
        whole = self.tokenize("a", special=True)
        self._first = whole[: max(position_of(bare, whole), 0)] if bare else []
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._control = ControlTokens(
            tokenizer.added_tokens_decoder
            if backend is None
            else backend.get_added_tokens_decoder()
        )
        self._quoted = QuotedText(self._control, backend, self.tokenize)
        self._longest_piece = max(map(len, vocabulary), default=1)
        self.infill = infill_of(vocabulary)

    @property
    def control(self) -> ControlTokens:
        """The control strings of the tokenizer."""
        return self._control

    def accept_media(self, media: MediaPrompts, *, adds_bos: bool) -> None:
        """Accept media in prompts from now on.

        adds_bos: whether the model's processor begins every prompt with the BOS token.
        """
        self._media = media
        self._bos = (self._tokenizer.bos_token or "") if adds_bos else ""

    def write_tools(self, support: ToolSupport) -> None:
        """Describe tools and calls as text from now on, if the template does not render them."""
        self._support = support

    def build(
        self, prompt: Prompt, attachments: Attachments | None = None, *, counted: bool = False
    ) -> BuiltPrompt:
        """Build a prompt. Raises InvalidRequest.

        counted: whether the prompt's tokens are only counted, so that it may exceed the context.
        """
        most = self._context_size * (_COUNTED_CONTEXTS if counted else 1)
        shown: list[Shown] = []
        items: list[MediaItem] = []
        positions: tuple[int, ...] = ()
        seen = _TAIL
        if attachments is not None:
            assert self._media is not None, "only models with media get requests with media"
            shown = self._media.items(attachments)
        if isinstance(prompt, TokenPrompt):
            text, tokens = "", list(prompt.tokens)
        elif isinstance(prompt, InfillPrompt):
            text, tokens = "", self._filled_in(prompt, most)
        elif isinstance(prompt, RawPrompt):
            text, begins = prompt.text, False
            if shown and self._media is not None:
                items = list(chain.from_iterable(shown))
                begins = self._media.begins
                text = self._with_bos(
                    self._media.surrounded(self._media.marked(text, shown), items)
                )
            tokens = self._raw(text, most, begins=begins)
        else:
            # Each step below copies the text, and the search for control strings blocks all other
            # threads, so messages that cannot fit are refused first. The prompt is at least as long
            # as the messages of users and tools without the white space around them.
            rendered = (
                message["content"] for message in prompt.messages if message["role"] in _SHOWN
            )
            self._require_short(sum(len(str(text).strip()) for text in rendered), most)
            # No BOS is added, because templates write it.
            messages = prompt.messages
            if attachments is not None and self._media is not None:
                messages, items = self._media.placed(messages, attachments, shown)
            quoted = self._control.quote(messages)
            messages = _open_ended(quoted.messages) if prompt.continues else quoted.messages
            if self._media is not None:
                messages = self._media.attach(messages, items)
            # Media refer to messages by their indices in the request.
            attached = replace(prompt, messages=messages)
            marked = self.render(self._with_tools_as_text(attached))
            if prompt.continues:
                marked = _up_to_the_end(marked)
                seen += len(str(prompt.messages[-1]["content"]))
            if items and self._media is not None:
                marked = self._media.surrounded(marked, items)
            self._require_short(len(marked), most)
            Roles(self._tokenizer.chat_template).require_shown(messages, marked)
            text = marked.replace(quoted.mark, "") if quoted.mark else marked
            if text == marked:
                tokens = self.tokenize(text)
            else:
                tokens = self._quoted.tokenize(marked, quoted.mark)
            if not (self._trims or counted):
                located = TokenPositions(marked, tokens, self._control.ids, self.tokenize)
                positions = located.of(self._cuts(attached, marked, items))
        media = None
        if items and self._media is not None:
            markers = self._media.ranges(tokens, items)
            items = self._media.processor.fitted(items, markers)
            positions = tuple(grown(position, markers, items) for position in positions)
            tokens, spans = spliced(tokens, markers, items)
            media = MediaPlan(tokens, spans)
        if not tokens:
            raise InvalidRequest("the prompt is empty: send text or tokens")
        if len(tokens) >= most:
            raise PromptTooLong(len(tokens), most - 1, self._context_size)
        self._require_known(tokens)
        if media is not None and media.spans[-1].stop == len(tokens):
            raise InvalidRequest(
                "the prompt ends with an image, a video or audio: write text after it"
            )
        return BuiltPrompt(tokens, text[-seen:], media, positions)

    def _filled_in(self, prompt: InfillPrompt, most: int) -> list[int]:
        if self.infill is None:
            raise InvalidRequest(
                f"{named('Metadata mlx.infill')} asks for the text between a prefix and a suffix,"
                " but the loaded model has no tokens for that: load a model such as Qwen2.5-Coder,"
                " or leave it out"
            )
        texts = (prompt.prefix, prompt.suffix, *(text for _, text in prompt.files))
        self._require_short(sum(map(len, texts)), most)
        tokens = self.infill.tokens(prompt, self._quoted.literal)
        return [*self._first, *tokens]

    def _cuts(self, prompt: ChatPrompt, text: str, items: Sequence[MediaItem]) -> Iterator[int]:
        """Yield how many characters of a rendered prompt each likely continuation shares.

        text: the rendered prompt.
        """
        lists = self._media is not None and self._media.lists
        for messages in continuations(prompt.messages, lists=lists, calls=bool(prompt.tools)):
            try:
                # No generation prompt, because nothing answers these conversations.
                continued = replace(prompt, messages=messages, continues=True)
                other = self.render(self._with_tools_as_text(continued))
            except InvalidRequest:
                continue
            if items and self._media is not None:
                other = self._media.surrounded(other, items)
            yield common_prefix(text, other.replace(_END, ""))

    def render(self, prompt: ChatPrompt, *, changes: bool = True) -> str:
        """Render a prompt with the chat template. Raises InvalidRequest.

        changes: whether to rearrange the turns of messages that the template refuses.
        """
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                f"{named('Messages')} cannot be used with this model: it has no chat template;"
                " send Prompt"
            )
        arguments: dict[str, Any] = dict(prompt.template_arguments)
        if prompt.tools is not None:
            arguments["tools"] = [dict(tool) for tool in prompt.tools]
        templates = self._tokenizer.chat_template
        prompt = replace(prompt, messages=Roles(templates).replaced(prompt.messages))
        if isinstance(templates, dict) and not templates.keys() & {
            "default",
            *(("tool_use",) if prompt.tools is not None else ()),
        }:
            raise InvalidRequest(
                f"{named('Messages')} cannot be used with this model as they are: its chat"
                f" templates are named {', '.join(sorted(templates))}, and none of them is the"
                f" default; send Prompt{', or Tools' if 'tool_use' in templates else ''}"
            )
        try:
            apply = self._apply_strictly if changes else self._apply
            text = self._with_bos(apply(prompt, arguments))
        except RecursionError:
            raise InvalidRequest(TOO_DEEP) from None
        except CostlyTemplate as cost:
            raise CostlyPrompt(f"the model's chat template was stopped: {cost}") from None
        except TemplateSyntaxError as fault:
            raise BrokenTemplate(
                f"line {fault.lineno} of its chat template is not valid: {fault.message}; correct"
                " the template, or remove it and send only raw prompts"
            ) from None
        except TemplateError as refusal:
            raise InvalidRequest(
                f"the model's chat template refused Messages: {unmarked(str(refusal.message))}"
            ) from None
        except _TEMPLATE_FAULTS as fault:
            raise InvalidRequest(
                f"the model's chat template cannot render Messages: {unmarked(str(fault))}"
            ) from None
        return without_halves(text)

    def _apply_strictly(self, prompt: ChatPrompt, arguments: dict[str, Any]) -> str:
        """Render the prompt. If the template refuses or omits turns, merge or move them."""
        text = ""
        refusal: Exception | None = None
        try:
            text = self._apply(prompt, arguments)
            if shows_instructions(prompt.messages, text):
                return text
        except (CostlyTemplate, TemplateSyntaxError):
            raise
        except (TemplateError, *_TEMPLATE_FAULTS) as fault:
            refusal = fault
        tried = [prompt.messages]
        for strict in _rearranged(prompt.messages):
            if strict not in tried:
                tried.append(strict)
                with suppress(TemplateError, *_TEMPLATE_FAULTS):
                    return self._apply(replace(prompt, messages=strict), arguments)
        if refusal is not None:
            raise refusal from None
        return text

    def _apply(self, prompt: ChatPrompt, arguments: dict[str, Any]) -> str:
        """Render the prompt without arguments that the template does not accept.

        Jinja ignores unknown arguments, but a template written in Python raises TypeError. Unknown
        arguments are then removed one by one, but never `tools`.
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
                _log.warning("the chat template has no argument %s, which is left out", unknown[1])
                del arguments[unknown[1]]

    def _with_tools_as_text(self, prompt: ChatPrompt) -> ChatPrompt:
        """Describe tools and calls as text if the template does not render them."""
        support = self._support
        if support is None or not (
            prompt.tools or (not support.calls and mentions_calls(prompt.messages))
        ):
            return prompt
        lists = self._media is not None and self._media.lists
        messages = with_tools_as_text(
            prompt.messages, prompt.tools or (), system=support.system, lists=lists
        )
        return replace(prompt, messages=messages, tools=None)

    def sample(
        self,
        messages: tuple[Mapping[str, Any], ...] = _SAMPLE,
        tools: tuple[Mapping[str, Any], ...] | None = None,
    ) -> str:
        """Render a short conversation; return '' if the template cannot.

        Raises CostlyPrompt, because a template that costs too much for a short conversation would
        fail for every prompt.
        """
        try:
            if self._media is not None:
                messages = self._media.attach(messages, ())
            return self.render(ChatPrompt(messages, tools), changes=False)
        except CostlyPrompt:
            raise
        except BrokenTemplate as fault:
            _log.warning("only raw prompts are answered: %s", fault)
            return ""
        except InvalidRequest:
            return ""

    def known_words(self) -> frozenset[str]:
        """Return the keys of `REASONING_WORDS` that change what the template renders."""
        found = set()
        for word, values in REASONING_WORDS.items():
            choices = ({"enable_thinking": True, word: value} for value in values)
            prompts = (ChatPrompt(_SAMPLE, template_arguments=chosen) for chosen in choices)
            with suppress(InvalidRequest):
                if len(set(map(self.render, prompts))) > 1:
                    found.add(word)
        return frozenset(found)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text. Raises UnreadableText.

        Special tokens in the text are recognised.

        special: whether to add the tokenizer's special tokens, such as BOS.
        """
        with tokenizing():
            return list(map(int, self._tokenizer.encode(text, add_special_tokens=special)))

    def detokenize(self, tokens: list[int]) -> str:
        """Return the text of token ids. Raises InvalidRequest."""
        for index, token in enumerate(tokens):
            if not 0 <= token < self._vocabulary_size:
                raise InvalidRequest(
                    f"{named(f'tokens[{index}]')} is {token}, but the vocabulary ends at"
                    f" {self._vocabulary_size - 1}"
                )
        with tokenizing():
            return str(self._tokenizer.decode(tokens))

    def encode_open(self, text: str) -> list[int]:
        """Tokenize a raw prompt as `build` does, including BOS. Raises InvalidRequest."""
        tokens = self._raw(text, self._context_size)
        self._require_known(tokens)
        return tokens

    def _raw(self, text: str, most: int, *, begins: bool = False) -> list[int]:
        """Return the tokens of a raw prompt, at most `most`, including BOS.

        begins: whether another token than BOS already begins the text.
        """
        self._require_short(len(text), most)
        tokens = self.tokenize(text)
        bos = self._tokenizer.bos_token or ""
        begins = begins or (bool(bos) and text.startswith(bos))
        return tokens if begins else [*self._first, *tokens]

    def _require_known(self, tokens: list[int]) -> None:
        if (highest := max(tokens, default=0)) >= self._model_vocabulary:
            piece = self._tokenizer.convert_ids_to_tokens(highest)
            raise InvalidRequest(
                f"the prompt contains the token {piece!r} ({highest}), which the tokenizer has but"
                f" the model does not: its vocabulary ends at {self._model_vocabulary - 1}"
            )

    def _with_bos(self, text: str) -> str:
        return text if text.startswith(self._bos) else self._bos + text

    def _require_short(self, characters: int, most: int) -> None:
        # No token is longer than the longest string in the vocabulary. A text that is far too long
        # is refused without being tokenised, which could take minutes.
        at_least = characters // self._longest_piece
        if at_least >= most:
            note = f"the fewest that {characters} characters can be"
            raise PromptTooLong(at_least, most - 1, self._context_size, note)
