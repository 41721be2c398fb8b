"""A byte-level tokenizer for grammars, and all texts that they allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from backend.engine.token_text import byte_level_alphabet

BYTES = 256


@dataclass(frozen=True)
class ByteTokenizer:
    """One token per byte, and markers after them; the last token ends the text.

    The attribute has the name that transformers gives it.
    """

    backend_tokenizer: Any
    size: int

    @property
    def end(self) -> int:
        return self.size - 1

    def table(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(
            self.backend_tokenizer.to_str(), n_vocab=self.size, eos_token=[self.end]
        )

    def text(self, tokens: Sequence[int]) -> str:
        kept = [token for token in tokens if token != self.end]
        return str(self.backend_tokenizer.decode(kept, skip_special_tokens=False))


def byte_tokenizer(special: Sequence[str] = (), plain: Sequence[str] = ()) -> ByteTokenizer:
    """One token per byte and one per marker; only those of `special` are special tokens."""
    alphabet = byte_level_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name in [*plain, *special, "<|the-end|>"]:
        is_special = name not in plain
        tokenizer.add_tokens([AddedToken(name, special=is_special, normalized=False)])
    return ByteTokenizer(tokenizer, tokenizer.get_vocab_size())


def texts_of(matcher: llguidance.LLMatcher, alphabet: bytes, longest: int) -> Iterator[bytes]:
    """All texts of an alphabet up to so many bytes that a matcher accepts."""
    waiting = [(b"", matcher)]
    while waiting:
        text, state = waiting.pop()
        if state.is_accepting():
            yield text
        if len(text) == longest or state.is_stopped():
            continue
        for byte in alphabet:
            after = state.deep_copy()
            if after.consume_token(byte):
                waiting.append((text + bytes([byte]), after))
