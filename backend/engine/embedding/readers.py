"""Turns requests into rows of tokens, and the model's output into answers.

Readers run on the prompt threads and on the event loop, never on the engine thread. The end of an
input that is too long is cut off, as in sentence-transformers, unless the request forbids it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias

from backend.engine.embedding.encoding import Encoded, Piece
from backend.engine.embedding.sentence_files import Prompts
from backend.engine.errors import InvalidRequest, TooLong
from common.field_names import named

LARGEST_TEXT = 1 << 20  # characters; tokenising takes a second

# Encodes a prompt and a text, or a query and a document, into a row. The third argument is the
# maximum number of tokens; None means no maximum.
EncodeRow: TypeAlias = Callable[[str, str, int | None], Piece]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model can read."""

    context: int  # maximum number of tokens in a row
    vocabulary: int  # number of token ids

    def bounded(self, name: str, text: str, *, truncate: bool) -> str:
        """Return a text of limited length, cut if `truncate` is true. Raises TooLong."""
        if len(text) <= LARGEST_TEXT:
            return text
        if truncate:
            return text[:LARGEST_TEXT]
        raise TooLong(
            f"{named(name)} is {len(text)} characters long, but the model reads {self.context}"
            f" tokens, and texts may have at most {LARGEST_TEXT} characters"
        )

    def check(self, name: str, length: int) -> None:
        """Raise TooLong for more tokens than the model reads."""
        if length > self.context:
            raise TooLong(
                f"{named(name)} is {length} tokens long, but the model reads at most"
                f" {self.context}: send a shorter text, split it, or let it be truncated"
            )

    def check_known(self, name: str, ids: Sequence[int], *, listed: bool = False) -> None:
        """Raise InvalidRequest for a token without an embedding: MLX would read other memory.

        listed: whether the request contains token ids, not a text.
        """
        for index, token in enumerate(ids):
            if not 0 <= token < self.vocabulary:
                field = f"{name}[{index}]" if listed else name
                raise InvalidRequest(
                    f"{named(field)} {'is' if listed else 'has'} the token {token}, but the model's"
                    f" vocabulary ends at {self.vocabulary - 1}"
                )


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to an Embedding request."""

    values: list[float]  # `rows` vectors of `dim` numbers, row-major
    rows: int
    dim: int
    per_token: bool  # whether each vector is the vector of a token
    prompt_tokens: int
    truncated: int = 0  # number of tokens of the text that were left out


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's index in the request, and its score."""

    index: int
    score: float


class Reader(Protocol):
    """Converts the requests of one RPC, such as Embedding, to rows, and the outputs to an answer.

    rpc: the name of the gRPC method.
    """

    rpc: ClassVar[str]


@dataclass(frozen=True)
class TextReader:
    """Reads one text into one row."""

    rpc: ClassVar[str] = "Embedding"
    encode: EncodeRow
    limits: Limits
    per_token: bool = False
    prompts: Prompts = field(default_factory=Prompts)  # the prompts that may precede the text
    truncates: bool = True  # whether texts are cut if the request does not state it

    def read_text(
        self,
        text: str,
        *,
        prompt_name: str | None = None,
        input_type: str = "",
        truncate: bool | None = None,
    ) -> list[Piece]:
        """Tokenise a text. Raises TooLong, InvalidRequest.

        prompt_name, input_type: as for `Prompts.chosen`.
        """
        truncate = self.truncates if truncate is None else truncate
        prompt = self.prompts.chosen(prompt_name, input_type)
        text = self.limits.bounded("Embeddings", text, truncate=truncate)
        piece = self.encode(prompt, text, self.limits.context if truncate else None)
        if not piece.ids:
            raise InvalidRequest(
                f"{named('Embeddings')} has no tokens: send a text that is not empty"
            )
        self.limits.check("Embeddings", len(piece.ids))
        self.limits.check_known("Embeddings", piece.ids)
        return [piece]

    def read_tokens(self, tokens: Sequence[int], *, truncate: bool | None = None) -> list[Piece]:
        """Use token ids as the client sent them. Raises TooLong, InvalidRequest."""
        ids = list(tokens)
        if self.truncates if truncate is None else truncate:
            ids = ids[: self.limits.context]
        self.limits.check("EmbeddingTokens", len(ids))
        self.limits.check_known("EmbeddingTokens", ids, listed=True)
        return [Piece(ids, cut=len(tokens) - len(ids))]

    def answer(self, pieces: Sequence[Piece], encoded: Encoded) -> Embedded:
        """Return the vector of the text, or the vectors of its tokens."""
        (output,) = encoded.outputs
        rows = output.shape[0] if self.per_token else 1
        return Embedded(
            values=output.reshape(-1).tolist(),
            rows=rows,
            dim=output.shape[-1],
            per_token=self.per_token,
            prompt_tokens=len(pieces[0].ids),
            truncated=pieces[0].cut,
        )


@dataclass(frozen=True)
class PairReader:
    """Reads a query and its documents, into one row for each document."""

    rpc: ClassVar[str] = "Rerank"
    encode: EncodeRow  # turns a query and a document into a row
    limits: Limits
    truncates: bool = True  # whether pairs are cut if the request does not state it
    # Returns an encoder for another prompt.
    prompted: Callable[[str], EncodeRow] | None = None

    def read(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool | None = None,
        prompt: str | None = None,
    ) -> list[Piece]:
        """Tokenise the pairs. Raises TooLong and InvalidRequest, which name the document.

        prompt: replaces the prompt of the checkpoint, such as a reranker's instruction.
        """
        encode = self.encode
        if prompt is not None and self.prompted is not None:
            encode = self.prompted(prompt)
        truncate = self.truncates if truncate is None else truncate
        limit = self.limits.context if truncate else None
        query = self.limits.bounded("query", query, truncate=truncate)
        pieces: list[Piece] = []
        for index, document in enumerate(documents):
            document = self.limits.bounded(f"documents[{index}]", document, truncate=truncate)
            piece = encode(query, document, limit)
            self.limits.check(f"the query with documents[{index}]", len(piece.ids))
            self.limits.check_known(f"the query with documents[{index}]", piece.ids)
            pieces.append(piece)
        return pieces

    def answer(self, encoded: Encoded, top_n: int) -> list[Ranked]:
        """Return the documents by score, and documents of equal score in the order of the request.

        top_n: maximum number of documents; 0 means all.
        """
        ranked = [Ranked(index, float(score)) for index, score in enumerate(encoded.outputs)]
        ranked.sort(key=lambda result: -result.score)
        return ranked[:top_n] if top_n else ranked
