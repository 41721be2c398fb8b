"""Incremental detokenisation. A character that spans several tokens is held back until complete.

The vocabulary is converted to bytes once per model, so streaming costs one table look-up per token.
mlx-lm 0.32.2's detokenizers are not used for the two common kinds of tokenizer: they drop the
leading space of a continuation, hold back a single space, and emit U+FFFD, at which LocalAI stops
reading a stream's text.
"""

from __future__ import annotations

import codecs
import json
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"


def byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins of GPT-2's byte-level BPE: character → byte value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    alphabet = {chr(value): value for value in printable}
    alphabet.update({chr(256 + rank): value for rank, value in enumerate(others)})
    return alphabet


class TextStream(Protocol):
    """Incremental decoder of one row."""

    def add(self, token: int) -> str:
        """Text that the token completes; '' while a character is still open."""

    def finish(self) -> str:
        """What is left. An unfinished character is dropped."""


class ByteStream:
    """Decoder over a table of token bytes; bytes that are not UTF-8 are dropped."""

    def __init__(self, table: list[bytes], strip_first_space: bool) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._strip = strip_first_space

    def add(self, token: int) -> str:
        if token >= len(self._table):
            return ""
        text = self._decoder.decode(self._table[token])
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text.replace(_REPLACEMENT, "")

    def finish(self) -> str:
        return ""


class TokenizerStream:
    """Fallback for decoders of an unknown kind: mlx-lm's own streaming detokenizer."""

    def __init__(self, detokenizer: Any) -> None:
        self._detokenizer = detokenizer

    def add(self, token: int) -> str:
        self._detokenizer.add_token(token)
        return str(self._detokenizer.last_segment).replace(_REPLACEMENT, "")

    def finish(self) -> str:
        self._detokenizer.finalize()
        return str(self._detokenizer.last_segment).replace(_REPLACEMENT, "")


class TokenTexts:
    """What the tokens of one model write.

    `tokenizer` is mlx-lm's TokenizerWrapper. Its fast tokenizer's decoder says what the vocabulary
    holds: byte-level stand-ins, or SentencePiece pieces with byte fallback.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = json.loads(backend.to_str()).get("decoder") if backend is not None else None
        kinds = [part["type"] for part in _parts(decoder)]
        self._table: list[bytes] | None = None
        self._strip = False
        if kinds and kinds[-1] == "ByteLevel":
            self._table = _byte_level_table(backend)
        elif "ByteFallback" in kinds and "Replace" in kinds:
            self._table = _sentencepiece_table(backend)
            self._strip = "Strip" in kinds

    def stream(self, continues: bool) -> TextStream:
        """A decoder for one row. continues: does its text go on from the prompt's?

        SentencePiece writes a space before every first word: an answer drops it, the continuation
        of a raw prompt keeps it.
        """
        if self._table is None:
            return TokenizerStream(self._tokenizer.detokenizer)
        return ByteStream(self._table, strip_first_space=self._strip and not continues)

    def bytes_of(self, token: int) -> bytes:
        """What the token writes; it may be a part of a character.

        Where the vocabulary is of an unknown kind, the bytes of its text when decoded alone.
        """
        if self._table is None:
            return str(self._tokenizer.decode([token])).encode()
        return self._table[token] if token < len(self._table) else b""


def _parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _pieces(backend: Any) -> tuple[list[str], frozenset[int]]:
    """Every id's piece ('' for holes), and which ids are added tokens, whose text is literal."""
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    pieces = [""] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token in vocabulary.items():
        pieces[token] = piece
    return pieces, frozenset(backend.get_added_tokens_decoder())


def _byte_level_table(backend: Any) -> list[bytes]:
    alphabet = byte_level_alphabet()
    pieces, added = _pieces(backend)

    def encode(token: int, piece: str) -> bytes:
        if token in added or any(character not in alphabet for character in piece):
            return piece.encode()
        return bytes(alphabet[character] for character in piece)

    return [encode(token, piece) for token, piece in enumerate(pieces)]


def _sentencepiece_table(backend: Any) -> list[bytes]:
    pieces, added = _pieces(backend)

    def encode(token: int, piece: str) -> bytes:
        if token in added:
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    return [encode(token, piece) for token, piece in enumerate(pieces)]
