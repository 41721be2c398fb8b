"""Turns requests into rows of tokens, and the model's output into answers.

Readers run on the prompt threads and on the event loop, never on the engine thread. A text that is
too long is refused and never truncated: a vector does not show that it stands for half a text.
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
    """context: maximum number of tokens in a row. vocabulary: number of token ids."""

    context: int
    vocabulary: int

    def check_text(self, name: str, text: str) -> None:
        """Raise TooLong for a text that would take long even to tokenise."""
        if len(text) > LARGEST_TEXT:
            raise TooLong(
                f"{name} is {len(text)} characters long, but the model reads {self.context} tokens,"
                f" and texts may have at most {LARGEST_TEXT} characters",
                name,
            )

    def check(self, name: str, length: int) -> None:
        """Raise TooLong for more tokens than the model reads."""
        if length > self.context:
            raise TooLong(
                f"{name} is {length} tokens long, but the model reads at most {self.context}:"
                " send a shorter text, or split it",
                name,
            )

    def check_known(self, name: str, ids: Sequence[int], *, listed: bool = False) -> None:
        """Raise InvalidRequest for a token without an embedding: MLX would read beyond the table.

        listed: whether the request has the ids, not their text.
        """
        for place, token in enumerate(ids):
            if not 0 <= token < self.vocabulary:
                field = f"{name}[{place}]" if listed else name
                raise InvalidRequest(
                    f"{field} {'is' if listed else 'has'} the token {token}, but the model's"
                    f" vocabulary ends at {self.vocabulary - 1}",
                    field,
                )


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to Embedding.

    values: `rows` vectors of `dim` numbers, row-major. per_token: whether they are token vectors.
    """

    values: list[float]
    rows: int
    dim: int
    per_token: bool
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's index in the request, and its relevance from 0 to 1."""

    index: int
    score: float


class Reader(Protocol):
    """Converts one kind of request other than generation. rpc: the name of the call."""

    rpc: ClassVar[str]


@dataclass(frozen=True)
class TextReader:
    """Reads one text into one row.

    encode: tokenises, adding the special tokens that the model expects. end_token: appended to
    rows that do not end with it, for models that pool this token; None: nothing is appended.
    """

    rpc: ClassVar[str] = "Embedding"
    encode: Callable[[str], list[int]]
    limits: Limits
    per_token: bool = False
    end_token: int | None = None

    def read_text(self, text: str) -> list[Piece]:
        """Tokenise a text. Raises TooLong, InvalidRequest."""
        self.limits.check_text("Embeddings", text)
        ids = self.encode(text)
        if self.end_token is not None and ids[-1:] != [self.end_token]:
            ids = [*ids, self.end_token]
        if not ids:
            raise InvalidRequest(
                "Embeddings has no tokens: send a text that is not empty", "Embeddings"
            )
        self.limits.check("Embeddings", len(ids))
        self.limits.check_known("Embeddings", ids)
        return [_single(ids)]

    def read_tokens(self, tokens: Sequence[int]) -> list[Piece]:
        """Use ids as they were sent, without adding any. Raises TooLong, InvalidRequest."""
        self.limits.check("EmbeddingTokens", len(tokens))
        self.limits.check_known("EmbeddingTokens", tokens, listed=True)
        return [_single(list(tokens))]

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
    """Reads a query and its documents, one row per document. encode: turns a pair into a row."""

    rpc: ClassVar[str] = "Rerank"
    encode: Callable[[str, str], Piece]
    limits: Limits

    def read(self, query: str, documents: Sequence[str]) -> list[Piece]:
        """Tokenise the pairs. Raises TooLong and InvalidRequest, which name the document."""
        self.limits.check_text("query", query)
        pieces: list[Piece] = []
        for index, document in enumerate(documents):
            self.limits.check_text(f"documents[{index}]", document)
            piece = self.encode(query, document)
            self.limits.check(f"the query with documents[{index}]", len(piece.ids))
            self.limits.check_known(f"the query with documents[{index}]", piece.ids)
            pieces.append(piece)
        return pieces

    def answer(self, encoded: Encoded, top_n: int) -> list[Ranked]:
        """The documents by score, equal ones in the order of the request. top_n: 0 means all."""
        ranked = [Ranked(index, float(score)) for index, score in enumerate(encoded.outputs)]
        ranked.sort(key=lambda one: -one.score)
        return ranked[:top_n] if top_n else ranked


def cross_encoder(tokenizer: Any, *, segments: bool) -> Callable[[str, str], Piece]:
    """Encodes pairs as the checkpoint's tokenizer joins them.

    tokenizer: a tokenizers.Tokenizer. segments: whether the model uses segment ids (BERT does,
    RoBERTa does not).
    """

    def encode(query: str, document: str) -> Piece:
        row = tokenizer.encode(query, document)
        return Piece(list(row.ids), list(row.type_ids)) if segments else _single(list(row.ids))

    return encode


def yes_no_prompt(tokenizer: Any) -> Callable[[str, str], Piece]:
    """Encodes pairs in the prompt format of Qwen3-Reranker's model card."""

    def encode(query: str, document: str) -> Piece:
        asked = f"<Instruct>: {_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        return _single(list(tokenizer.encode(_BEFORE + asked + _AFTER).ids))

    return encode


def _single(ids: list[int]) -> Piece:
    return Piece(ids, [0] * len(ids))
