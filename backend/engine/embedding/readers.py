"""Turns requests into rows of tokens, and the model's output into answers.

Readers run on the prompt threads and on the event loop, never on the engine thread. They encode
rows with the checkpoint's tokenizer or its chat template.

Rows that are too long are truncated as in sentence-transformers, unless the request forbids it: a
text loses its end, a pair the end of the longer text, and a rendered chat the end of the contents,
before the template's last words. If the tokenizer's `truncation_side` is left, texts and pairs lose
their beginning instead. The tokens that a tokenizer or a template adds are never removed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeAlias

from backend.engine.embedding.encoding import Encoded, Piece
from backend.engine.embedding.sentence_files import Prompts
from backend.engine.errors import InvalidRequest, TooLong
from common.field_names import named
from common.prefixes import common_prefix

LARGEST_TEXT = 1 << 20  # characters; tokenising takes a second

# Encodes a prompt and a text, or a query and a document, into a row. The third argument is the
# maximum number of tokens; None means no maximum.
EncodeRow: TypeAlias = Callable[[str, str, int | None], Piece]
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_GEMMA_INSTRUCTION = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query"
    " by providing a prediction of either 'Yes' or 'No'."
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


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
        """Tokenise a text. Raises TooLong, InvalidRequest."""
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
    # Returns the encoder that turns a query and a document into a row, for a prompt.
    prompted: Callable[[str], EncodeRow]
    limits: Limits
    truncates: bool = True  # whether pairs are cut if the request does not state it
    prompt: str = ""  # the prompt of the checkpoint

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
        encode = self.prompted(self.prompt if prompt is None else prompt)
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


def text_encoder(
    tokenizer: Any,
    *,
    lower: bool = False,
    end_token: int | None = None,
    pools_prompt: bool = True,
    special: bool = True,
    side: str = "right",
) -> EncodeRow:
    """Return an encoder of single texts.

    end_token: a token that is appended to rows that do not end with this token, or with another
        that the tokenizer has appended; None for no token.
    pools_prompt: whether the tokens of a prompt are pooled.
    side: the side on which a text that is too long loses tokens, `right` or `left`.
    """

    def tokens(text: str) -> Any:
        return tokenizer.encode(text.lower() if lower else text, add_special_tokens=special)

    def encode(prompt: str, text: str, limit: int | None) -> Piece:
        row = tokens(prompt + text)
        piece = _single(list(row.ids), list(row.sequence_ids), end_token, limit, side)
        if prompt and not pools_prompt:
            alone = tokens(prompt).sequence_ids
            piece = replace(piece, unpooled=len(alone) - (alone[-1:] == [None]))
        return piece

    return encode


def id_encoder(
    encode_ids: Callable[[str], list[int]],
    special: Collection[int] = (),
    end_token: int | None = None,
    side: str = "right",
) -> EncodeRow:
    """Return an encoder of single texts that uses a function from texts to token ids.

    special: ids of special tokens. Those at the ends of a row stay if it is truncated.
    end_token, side: as for `text_encoder`.
    """

    def encode(prompt: str, text: str, limit: int | None) -> Piece:
        ids = encode_ids(prompt + text)
        owners: list[int | None] = [0] * len(ids)
        for end in (0, -1) if ids else ():
            if ids[end] in special:
                owners[end] = None
        return _single(ids, owners, end_token, limit, side)

    return encode


def _single(
    ids: list[int],
    owners: list[int | None],
    end_token: int | None,
    limit: int | None,
    side: str,
) -> Piece:
    if end_token is not None and ids[-1:] != [end_token] and owners[-1:] != [None]:
        ids, owners = [*ids, end_token], [*owners, None]
    return _truncated(ids, [0] * len(ids), owners, limit, side)


def pair_encoder(
    tokenizer: Any, segments: bool, prompt: str = "", side: str = "right"
) -> EncodeRow:
    """Return an encoder of pairs for a cross-encoder.

    segments: whether the model uses segment ids (BERT does, RoBERTa does not).
    side: as for `text_encoder`.
    """

    def encode(query: str, document: str, limit: int | None) -> Piece:
        row = tokenizer.encode(prompt + query, document)
        types = list(row.type_ids) if segments else [0] * len(row.ids)
        return _truncated(list(row.ids), types, list(row.sequence_ids), limit, side)

    return encode


def _truncated(
    ids: list[int],
    types: list[int],
    owners: Sequence[int | None],
    limit: int | None,
    side: str = "right",
) -> Piece:
    """Return a row of at most `limit` tokens.

    owners: for each token, the index of its text; None for a token that the tokenizer has added.
    """
    if limit is None or len(ids) <= limit:
        return Piece(ids, types)
    lengths = owners.count(0), owners.count(1)
    left = list(_shares(*lengths, max(limit - (len(ids) - sum(lengths)), 0)))
    kept = []
    for index in range(len(ids))[:: -1 if side == "left" else 1]:
        owner = owners[index]
        if owner is not None:
            left[owner] -= 1
            if left[owner] < 0:
                continue
        kept.append(index)
    kept.sort()
    return Piece([ids[at] for at in kept], [types[at] for at in kept], len(ids) - len(kept))


def _shares(first: int, second: int, most: int) -> tuple[int, int]:
    """Return how many tokens of two texts stay if the longer text is shortened first.

    most: maximum number of tokens of both texts.
    """
    if first > second:
        return _shares(second, first, most)[::-1]
    first = min(first, most // 2)
    return first, min(second, most - first)


@dataclass(frozen=True)
class ChatEncoder:
    """Encodes messages as the chat template renders them."""

    render: Callable[[list[dict[str, Any]]], str]  # turns messages into a prompt
    tokenizer: Any  # a tokenizers.Tokenizer
    parts: bool = False  # whether the content of a message is a list of parts instead of a string

    def encode(self, contents: Mapping[str, str], limit: int | None) -> Piece:
        """Encode one message of each role.

        contents: contents of the messages by role. An empty system message is left out.
        """
        ids = self._ids(contents)
        if limit is None or len(ids) <= limit:
            return Piece(ids)
        last = self._last_words(contents)[-limit:]
        kept = ids[: limit - len(last)] + last
        return Piece(kept, cut=len(ids) - len(kept))

    def encode_text(self, prompt: str, text: str, limit: int | None) -> Piece:
        """Encode a text as a user message."""
        return self.encode({"system": prompt, "user": text}, limit)

    def pairs(self, prompt: str) -> EncodeRow:
        """Return an encoder of a query and a document as two messages after the system message."""
        return lambda query, document, limit: self.encode(
            {"system": prompt, "query": query, "document": document}, limit
        )

    @property
    def renders_pairs(self) -> bool:
        """Whether the template renders both the query and the document."""
        words = {"query": "the-query-7", "document": "the-document-8"}
        try:
            text = self._text(words)
        except Exception:  # a template may raise anything for an unknown role
            return False
        return all(word in text for word in words.values())

    def _text(self, contents: Mapping[str, str]) -> str:
        messages = [
            {
                "role": role,
                "content": [{"type": "text", "text": content}] if self.parts else content,
            }
            for role, content in contents.items()
            if content or role != "system"
        ]
        return self.render(messages)

    def _ids(self, contents: Mapping[str, str]) -> list[int]:
        return list(self.tokenizer.encode(self._text(contents), add_special_tokens=False).ids)

    def _last_words(self, contents: Mapping[str, str]) -> list[int]:
        """Return the tokens after the contents, which end the rendering of any contents."""
        first, second = (
            self._ids({role: contents[role] if role == "system" else text for role in contents})
            for text in ("0", "1 2 3 4")
        )
        count = common_prefix(first[::-1], second[::-1])
        return first[len(first) - count :] if count < min(len(first), len(second)) else []


def qwen3_prompt(tokenizer: Any, instruction: str) -> EncodeRow:
    """Return an encoder of pairs in the prompt format of Qwen3-Reranker's model card.

    instruction: what relevant documents are; "" for the model card's instruction.
    """

    def render(messages: list[dict[str, Any]]) -> str:
        query, document = (message["content"] for message in messages)
        asked = (
            f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        )
        return _BEFORE + asked + _AFTER

    return ChatEncoder(render, tokenizer).pairs("")


def gemma_prompt(tokenizer: Any, instruction: str) -> EncodeRow:
    """Return an encoder of pairs in the prompt format of bge-reranker-v2-gemma's model card.

    The parts of a prompt are tokenised apart from each other.

    instruction: what to predict; "" for the model card's instruction.
    """

    def tokens(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(query: str, document: str, limit: int | None) -> Piece:
        parts = (
            ([tokenizer.token_to_id("<bos>")], None),
            (tokens(f"A: {query}"), 0),
            (tokens("\n"), None),
            (tokens(f"B: {document}"), 1),
            (tokens("\n") + tokens(instruction or _GEMMA_INSTRUCTION), None),
        )
        ids = [token for part, _ in parts for token in part]
        owners = [owner for part, owner in parts for _ in part]
        return _truncated(ids, [0] * len(ids), owners, limit)

    return encode
