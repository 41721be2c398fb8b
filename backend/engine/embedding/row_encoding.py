"""Encodes texts and pairs into rows, as the checkpoint's tokenizer or its chat template joins them.

Rows that are too long are truncated as sentence-transformers does it: of a text the end, of a pair
the end of the longer text, and of a rendered chat the end of what precedes the template's last
words. The tokens that a tokenizer or a template adds stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backend.engine.embedding.encoding import Piece
from backend.engine.embedding.readers import EncodeRow

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def text_encoder(
    tokenizer: Any,
    *,
    lower: bool = False,
    end_token: int | None = None,
    pools_prompt: bool = True,
) -> EncodeRow:
    """Encodes single texts.

    tokenizer: a tokenizers.Tokenizer. lower: whether texts are turned into lower case. end_token:
    appended to rows that do not end with it; None for none. pools_prompt: whether the tokens of a
    prompt are pooled.
    """

    def tokens(text: str) -> Any:
        return tokenizer.encode(text.lower() if lower else text)

    def encode(prompt: str, text: str, limit: int | None) -> Piece:
        row = tokens(prompt + text)
        piece = _single(list(row.ids), list(row.sequence_ids), end_token, limit)
        if prompt and not pools_prompt:
            alone = tokens(prompt).sequence_ids
            piece = replace(piece, unpooled=len(alone) - (alone[-1:] == [None]))
        return piece

    return encode


def id_encoder(
    encode_ids: Callable[[str], list[int]],
    special: Collection[int] = (),
    end_token: int | None = None,
) -> EncodeRow:
    """Encodes single texts with a function that does not tell which tokens it adds.

    special: the ids of special tokens; one at the end stays if a row is truncated. end_token: as
    for `text_encoder`.
    """

    def encode(prompt: str, text: str, limit: int | None) -> Piece:
        ids = encode_ids(prompt + text)
        owners: list[int | None] = [0] * len(ids)
        if ids and ids[-1] in special:
            owners[-1] = None
        return _single(ids, owners, end_token, limit)

    return encode


def _single(
    ids: list[int], owners: list[int | None], end_token: int | None, limit: int | None
) -> Piece:
    if end_token is not None and ids[-1:] != [end_token]:
        ids, owners = [*ids, end_token], [*owners, None]
    return _truncated(ids, [0] * len(ids), owners, limit)


def pair_encoder(tokenizer: Any, *, segments: bool, prompt: str = "") -> EncodeRow:
    """Encodes pairs for a cross-encoder.

    tokenizer: a tokenizers.Tokenizer. segments: whether the model uses segment ids (BERT does,
    RoBERTa does not). prompt: put in front of the query.
    """

    def encode(query: str, document: str, limit: int | None) -> Piece:
        row = tokenizer.encode(prompt + query, document)
        types = list(row.type_ids) if segments else [0] * len(row.ids)
        return _truncated(list(row.ids), types, list(row.sequence_ids), limit)

    return encode


def _truncated(
    ids: list[int], types: list[int], owners: Sequence[int | None], limit: int | None
) -> Piece:
    """owners: for each token the index of its text; None if the tokenizer added it."""
    if limit is None or len(ids) <= limit:
        return Piece(ids, types)
    first, second = owners.count(0), owners.count(1)
    room = max(limit - (len(ids) - first - second), 0)
    left = list(_shares(first, second, room))
    kept = []
    for place, owner in enumerate(owners):
        if owner is not None:
            left[owner] -= 1
            if left[owner] < 0:
                continue
        kept.append(place)
    return Piece([ids[at] for at in kept], [types[at] for at in kept], len(ids) - len(kept))


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts stay, if the longer one is shortened first."""
    if first > second:
        return _shares(second, first, room)[::-1]
    second = first if first > room else max(first, room - first)
    if first + second > room:
        first, second = room // 2, room - room // 2
    return first, second


@dataclass(frozen=True)
class ChatEncoder:
    """Encodes messages as the chat template renders them.

    render: turns messages into text. tokenizer: a tokenizers.Tokenizer. parts: whether a content is
    a list of parts instead of a string.
    """

    render: Callable[[list[dict[str, Any]]], str]
    tokenizer: Any
    parts: bool = False

    def encode(self, contents: Mapping[str, str], limit: int | None) -> Piece:
        """Encode a message of each role. contents: by role; an empty system message is left out."""
        ids = self._ids(contents)
        if limit is None or len(ids) <= limit:
            return Piece(ids, [0] * len(ids))
        last = self._last_words(contents)[-limit:]
        kept = ids[: limit - len(last)] + last
        return Piece(kept, [0] * len(kept), len(ids) - len(kept))

    def encode_text(self, prompt: str, text: str, limit: int | None) -> Piece:
        """Encode a text as the user's message. prompt: the system's."""
        return self.encode({"system": prompt, "user": text}, limit)

    def pairs(self, prompt: str) -> EncodeRow:
        """Encodes a query and a document as two messages after the system's."""
        return lambda query, document, limit: self.encode(
            {"system": prompt, "query": query, "document": document}, limit
        )

    @property
    def renders_pairs(self) -> bool:
        """Whether the template renders both the query and the document."""
        words = {"query": "the-query-7", "document": "the-document-8"}
        try:
            text = self._text(words)
        except Exception:  # a template raises what it likes for a role that it does not know
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
        """The tokens after the contents: those that two renderings have in common."""
        one, other = (
            self._ids({role: contents[role] if role == "system" else text for role in contents})
            for text in ("0", "1 2 3 4")
        )
        count = 0
        while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
            count += 1
        return one[len(one) - count :] if count < min(len(one), len(other)) else []


def qwen3_prompt(tokenizer: Any) -> EncodeRow:
    """Encodes pairs in the prompt format of Qwen3-Reranker's model card."""

    def render(messages: list[dict[str, Any]]) -> str:
        query, document = (message["content"] for message in messages)
        asked = f"<Instruct>: {_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        return _BEFORE + asked + _AFTER

    return ChatEncoder(render, tokenizer).pairs("")
