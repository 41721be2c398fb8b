"""Incremental detokenisation: a character of several tokens is delayed until it is complete.

A token's bytes are looked up when the token is generated: a table of a whole vocabulary would take
a fifth of a second of each load. For the two common kinds of tokenizer, mlx-lm's detokenizers are
not used, because they drop the leading space of a continuation, delay a single space, and return
U+FFFD, at which LocalAI stops reading a stream's text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"
_UNFINISHED = 8  # maximum delay in tokens; a character has up to four bytes
_USUAL = 1 << 13  # number of tokens whose bytes and text are remembered
_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each character of the alphabet of GPT-2's byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    alphabet = {chr(value): value for value in printable}
    alphabet.update({chr(256 + rank): value for rank, value in enumerate(others)})
    return alphabet


class TextStream(Protocol):
    """Incremental decoder of one row."""

    def add(self, token: int) -> str:
        """Return the text that the token completes; '' if a character is still incomplete."""

    def finish(self) -> str:
        """Return the text that was delayed, without an incomplete character."""


class ByteStream:
    """Decoder over the bytes of single tokens; bytes that are not UTF-8 are dropped.

    strip_first_space: whether to remove a space at the beginning of the text.
    text_of: returns the text of a token, or None if the token is not whole characters. It is used
        where possible, because decoding bytes takes longer.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        strip_first_space: bool,
        text_of: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self._bytes_of, self._text_of = bytes_of, text_of
        self._incomplete = b""  # the first bytes of a character
        self._strip = strip_first_space

    def add(self, token: int) -> str:
        if self._incomplete or (text := self._text_of(token)) is None:
            known = self._incomplete + self._bytes_of(token)
            text, used = codecs.utf_8_decode(known, "ignore", False)
            text, self._incomplete = text.replace(_REPLACEMENT, ""), known[used:]
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return ""


class WindowStream:
    """Decoder for tokenizers of an unknown kind: decodes each token with the tokens before.

    The text of a token may depend on neighbouring tokens, for example if spaces are removed.
    context: the tokens before the first token.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(context)
        self._sent = len(self._window)  # tokens of the window whose text was returned

    def add(self, token: int) -> str:
        self._window.append(token)
        return self._next(whole=len(self._window) - self._sent < _UNFINISHED)

    def finish(self) -> str:
        return self._next(whole=False)

    def _next(self, *, whole: bool) -> str:
        before, text = self._decode(self._window[: self._sent]), self._decode(self._window)
        if whole and (len(text) <= len(before) or text.endswith(_REPLACEMENT)):
            return ""
        self._window = self._window[self._sent :]
        self._sent = len(self._window)
        return text[len(before) :].replace(_REPLACEMENT, "")


class TokenTexts:
    """The text of one model's tokens.

    tokenizer: mlx-lm's TokenizerWrapper. The decoder of its fast tokenizer shows the kind of
        vocabulary: byte-level BPE, or SentencePiece with byte fallback.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        parts = _parts(None if decoder is None else json.loads(decoder.__getstate__()))
        self._bytes_of: Callable[[int], bytes] | None = None
        self._strip = False
        if [part["type"] for part in parts] == ["ByteLevel"]:
            self._bytes_of = lru_cache(_USUAL)(_byte_level(backend))
        elif parts[:3] == _SENTENCEPIECE and parts[3:] in ([], [_FIRST_SPACE]):
            self._bytes_of = lru_cache(_USUAL)(_sentencepiece(backend))
            self._strip = len(parts) > 3
        self._text_of = lru_cache(_USUAL)(self._whole_text)

    def stream(self, continues: bool) -> TextStream:
        """Return a text decoder for one row.

        SentencePiece puts a space before the first word. It remains if the text `continues` a raw
        prompt, but not in an answer in a chat.
        """
        if self._bytes_of is None:
            return WindowStream(self._decode, self._context() if continues else ())
        strips = self._strip and not continues
        return ByteStream(self._bytes_of, strips, self._text_of)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, which may be part of a character.

        If the kind of vocabulary is unknown: the bytes that the token adds after other text.
        """
        if self._bytes_of is None:
            return WindowStream(self._decode, self._context()).add(token).encode()
        return self._bytes_of(token)

    def _whole_text(self, token: int) -> str | None:
        """Return the text of a token, or None if that is not whole characters."""
        try:
            return self.bytes_of(token).decode().replace(_REPLACEMENT, "")
        except UnicodeDecodeError:
            return None

    def _decode(self, tokens: list[int]) -> str:
        try:
            # "Cleaning up" would remove spaces that have been sent.
            return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        except Exception:
            raise
        except BaseException as panic:  # Rust's, which would end the engine thread
            raise RuntimeError(f"the tokenizer cannot decode: {panic}") from None

    def _context(self) -> list[int]:
        return list(self._tokenizer.encode("a", add_special_tokens=False))


def _parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_level(backend: Any) -> Callable[[int], bytes]:
    alphabet = byte_level_alphabet()
    added = backend.get_added_tokens_decoder()  # their text is literal

    def bytes_of(token: int) -> bytes:
        piece = backend.id_to_token(token) or ""
        if token in added or not alphabet.keys() >= set(piece):
            return str(piece).encode()
        return bytes(alphabet[character] for character in piece)

    return bytes_of


def _sentencepiece(backend: Any) -> Callable[[int], bytes]:
    def bytes_of(token: int) -> bytes:
        piece = backend.id_to_token(token) or ""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        # Added tokens too: Gemma's are runs of spaces.
        return str(piece).replace("\u2581", " ").encode()

    return bytes_of
