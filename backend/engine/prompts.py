"""Prompts to tokens: the chat template, the BOS rule, the limit of the context.

Runs on its own threads, off the event loop and off the engine thread: rendering and tokenising a
long prompt may take seconds.
"""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from backend.engine.errors import InvalidRequest
from backend.engine.request import ChatPrompt, RawPrompt

_SAMPLE = ({"role": "user", "content": "Hello"},)


class PromptBuilder:
    """Turns prompts into token ids for one loaded model.

    tokenizer: mlx-lm's TokenizerWrapper. context_size: tokens of prompt and output together.
    """

    def __init__(self, tokenizer: Any, context_size: int) -> None:
        self._tokenizer = tokenizer
        self._context_size = context_size
        self._vocabulary_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self._longest_piece = max(map(len, tokenizer.get_vocab()), default=1)

    def build(self, prompt: RawPrompt | ChatPrompt) -> list[int]:
        """Token ids of the whole prompt. Raises InvalidRequest."""
        if isinstance(prompt, RawPrompt):
            text = prompt.text
            bos = self._tokenizer.bos_token
            tokens = self._encode(text, special=not (bos and text.startswith(bos)))
        else:
            # A template writes its own BOS; adding the tokenizer's would double it.
            tokens = self._encode(self.render(prompt), special=False)
        if not tokens:
            raise InvalidRequest("the prompt is empty: it has no token")
        if len(tokens) >= self._context_size:
            raise self._too_long(f"{len(tokens)} tokens")
        return tokens

    def render(self, prompt: ChatPrompt) -> str:
        """The chat template's text for these messages. Raises InvalidRequest."""
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                "Messages cannot be used with this model: it has no chat template; send Prompt"
            )
        arguments: dict[str, Any] = dict(prompt.template_arguments)
        if prompt.tools is not None:
            arguments["tools"] = [dict(tool) for tool in prompt.tools]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in prompt.messages],
                    tokenize=False,
                    add_generation_prompt=True,
                    **arguments,
                )
            )
        except TemplateError as refusal:
            raise InvalidRequest(
                f"the model's chat template refused Messages: {refusal.message}"
            ) from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as fault:
            raise InvalidRequest(
                f"the model's chat template cannot render Messages: {fault}"
            ) from None

    def sample(self) -> str:
        """A short conversation as the template renders it, or '' where it cannot."""
        try:
            return self.render(ChatPrompt(_SAMPLE))
        except InvalidRequest:
            return ""

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text; special-token text is parsed, and nothing is added."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def detokenize(self, tokens: list[int]) -> str:
        """Text of token ids. Raises InvalidRequest."""
        for place, token in enumerate(tokens):
            if not 0 <= token < self._vocabulary_size:
                raise InvalidRequest(
                    f"tokens[{place}] is {token}, but the vocabulary ends at"
                    f" {self._vocabulary_size - 1}"
                )
        return str(self._tokenizer.decode(tokens))

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # No token is longer than the longest piece of the vocabulary, so a text far beyond the
        # context is known to be too long without the minutes that tokenising it would take.
        at_least = len(text) // self._longest_piece
        if at_least >= self._context_size:
            raise self._too_long(f"at least {at_least} tokens")
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=special)]

    def _too_long(self, length: str) -> InvalidRequest:
        return InvalidRequest(
            f"the prompt has {length}, but the context holds {self._context_size} with at least"
            " one of output: shorten the prompt or load the model with a larger ContextSize"
        )
