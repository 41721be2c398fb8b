"""Requests to rows of tokens, and the model's output back to what was asked for.

Readers run on the prompt threads and on the event loop, never on the engine thread. What is too
long is refused with both lengths: a vector of half a text looks like any other vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from backend.engine.embedding.encoding import Encoded, Piece
from backend.engine.errors import InvalidRequest, TooLong

LARGEST_TEXT = 1 << 20  # characters; tokenising takes a second
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Limits:
    """context: tokens that the model reads at once. vocabulary: ids that it knows."""

    context: int
    vocabulary: int

    def check_text(self, name: str, text: str) -> None:
        """Raise TooLong before tokenising would take long."""
        if len(text) > LARGEST_TEXT:
            raise TooLong(
                f"{name} is {len(text)} characters long: the model reads {self.context} tokens,"
                f" and at most {LARGEST_TEXT} characters are looked at",
                name,
            )

    def check(self, name: str, length: int) -> None:
        """Raise TooLong."""
        if length > self.context:
            raise TooLong(
                f"{name} is {length} tokens long, but the model reads at most {self.context}:"
                " send a shorter text, or cut it in parts",
                name,
            )


@dataclass(frozen=True, slots=True)
class Embedded:
    """values: row-major, `rows` vectors of `dim` numbers; per_token: one for each token."""

    values: list[float]
    rows: int
    dim: int
    per_token: bool
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document by its place in the request, and its relevance from 0 to 1."""

    index: int
    score: float


class Reader(Protocol):
    """What a loaded model can be asked besides generating. rpc: the name of its call."""

    rpc: ClassVar[str]


@dataclass(frozen=True)
class TextReader:
    """One text, one row. encode: to ids, with the special tokens that the model expects.

    end_token: appended where the text does not end with it, for models that were trained to be
    read at that token; None where the tokenizer's own rules are all.
    """

    rpc: ClassVar[str] = "Embedding"
    encode: Callable[[str], list[int]]
    limits: Limits
    per_token: bool = False
    end_token: int | None = None

    def read_text(self, text: str) -> list[Piece]:
        """Raises TooLong, InvalidRequest."""
        self.limits.check_text("Embeddings", text)
        ids = self.encode(text)
        if self.end_token is not None and ids[-1:] != [self.end_token]:
            ids = [*ids, self.end_token]
        if not ids:
            raise InvalidRequest(
                "Embeddings has no token: send a text that says something", "Embeddings"
            )
        self.limits.check("Embeddings", len(ids))
        self._require_known(ids, "Embeddings")
        return [_single(ids)]

    def read_tokens(self, tokens: Sequence[int]) -> list[Piece]:
        """Ids as they are: special tokens are the sender's. Raises TooLong, InvalidRequest."""
        self.limits.check("EmbeddingTokens", len(tokens))
        self._require_known(tokens, "EmbeddingTokens")
        return [_single(list(tokens))]

    def _require_known(self, ids: Sequence[int], name: str) -> None:
        for place, token in enumerate(ids):
            if not 0 <= token < self.limits.vocabulary:
                raise InvalidRequest(
                    f"{name}[{place}] is the token {token}, but the model's vocabulary ends at"
                    f" {self.limits.vocabulary - 1}",
                    f"{name}[{place}]",
                )

    def answer(self, pieces: Sequence[Piece], encoded: Encoded) -> Embedded:
        """The vector or vectors of the one row."""
        (output,) = encoded.outputs
        rows = output.shape[0] if self.per_token else 1
        return Embedded(
            values=output.reshape(-1).tolist(),
            rows=rows,
            dim=output.shape[-1],
            per_token=self.per_token,
            prompt_tokens=len(pieces[0].ids),
        )


@dataclass(frozen=True)
class PairReader:
    """A query with each document, one row per document. encode: a pair to a row."""

    rpc: ClassVar[str] = "Rerank"
    encode: Callable[[str, str], Piece]
    limits: Limits

    def read(self, query: str, documents: Sequence[str]) -> list[Piece]:
        """Raises TooLong with the document at fault."""
        self.limits.check_text("query", query)
        pieces: list[Piece] = []
        for index, document in enumerate(documents):
            self.limits.check_text(f"documents[{index}]", document)
            piece = self.encode(query, document)
            self.limits.check(f"the query with documents[{index}]", len(piece.ids))
            pieces.append(piece)
        return pieces

    def answer(self, encoded: Encoded, top_n: int) -> list[Ranked]:
        """The best first, equal ones in the order of the request; top_n 0 means all."""
        ranked = [Ranked(index, float(score)) for index, score in enumerate(encoded.outputs)]
        ranked.sort(key=lambda one: -one.score)
        return ranked[:top_n] if top_n else ranked


def cross_encoder(tokenizer: Any, *, tells_apart: bool) -> Callable[[str, str], Piece]:
    """Pairs as the checkpoint's own tokenizer joins them.

    tokenizer: of the tokenizers package. tells_apart: the model reads which of the two a token
    belongs to (BERT does, RoBERTa does not).
    """

    def encode(query: str, document: str) -> Piece:
        row = tokenizer.encode(query, document)
        return Piece(list(row.ids), list(row.type_ids)) if tells_apart else _single(list(row.ids))

    return encode


def yes_no_prompt(tokenizer: Any) -> Callable[[str, str], Piece]:
    """Pairs as Qwen3-Reranker was trained to read them (its model card)."""

    def encode(query: str, document: str) -> Piece:
        asked = f"<Instruct>: {_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        return _single(list(tokenizer.encode(_BEFORE + asked + _AFTER).ids))

    return encode


def _single(ids: list[int]) -> Piece:
    return Piece(ids, [0] * len(ids))
