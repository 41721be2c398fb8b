"""Describes the media in a prompt's tokens, and the key by which caches compare such prompts.

The data is created on a prompt thread and read on the engine thread. It contains no MLX arrays.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IMAGE, VIDEO, AUDIO = "image", "video", "audio"


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, video or audio item as the model's processor has prepared it."""

    kind: str  # `IMAGE`, `VIDEO` or `AUDIO`
    digest: bytes  # a hash of the item's content, 32 bytes
    # The item's tokens, including text that the processor writes around the item.
    whole: tuple[int, ...]
    # The index of the first token of `whole` that belongs in a prompt, and how many tokens do.
    first: int
    count: int
    arrays: Mapping[str, Any]  # the encoder's inputs by the processor's names, as NumPy arrays
    nbytes: int  # size of the arrays
    # The tokens for the encoder if they differ from `whole`, because the encoder expects one
    # placeholder for all embeddings of the item, or tokens outside the vocabulary.
    encoded: tuple[int, ...] = ()
    # Number of BOS tokens (0 or 1) that the processor wrote. `whole` begins with the BOS token,
    # unless the item has only one placeholder.
    bos: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The item's tokens in a prompt, including control tokens before and after the item."""
        return self.whole[self.first : self.first + self.count]

    @property
    def key(self) -> tuple[int, ...]:
        """Negative numbers, derived from the digest, by which caches compare the item's tokens."""
        words = [-1 - (word & 0x7FFFFFFF) for word in struct.unpack("<8I", self.digest)]
        return tuple(itertools.islice(itertools.cycle(words), len(self.tokens)))


@dataclass(frozen=True, slots=True)
class Span:
    """An item and the index of its first token in the prompt."""

    start: int
    item: MediaItem

    @property
    def stop(self) -> int:
        return self.start + len(self.item.tokens)


class MediaPlan:
    """The media of a prompt, in order.

    key: the prompt's tokens, with every item's tokens replaced by its `key`. Two prompts can share
    the KV of a prefix if and only if their keys are equal there.
    """

    def __init__(self, tokens: Sequence[int], spans: Sequence[Span]) -> None:
        self.spans: tuple[Span, ...] = tuple(spans)
        key = list(tokens)
        for span in self.spans:
            key[span.start : span.stop] = span.item.key
        self.key: tuple[int, ...] = tuple(key)

    def before(self, length: int) -> int:
        """Return the longest prefix of at most `length` tokens that does not end inside an item."""
        for span in self.spans:
            if span.start < length < span.stop:
                return span.start
        return length


def spliced(
    tokens: Sequence[int], ranges: Sequence[tuple[int, int]], items: Sequence[MediaItem]
) -> tuple[list[int], list[Span]]:
    """Return the prompt with each marker replaced by its item's tokens, and the items' spans.

    ranges: the (start, stop) of each item's marker in `tokens`, in ascending order.
    """
    prompt: list[int] = []
    spans: list[Span] = []
    done = 0
    for (start, stop), item in zip(ranges, items, strict=True):
        prompt += tokens[done:start]
        spans.append(Span(len(prompt), item))
        prompt += item.tokens
        done = stop
    return [*prompt, *tokens[done:]], spans


def grown(length: int, ranges: Sequence[tuple[int, int]], items: Sequence[MediaItem]) -> int:
    """Return the length that a prefix of `length` tokens has after `spliced`."""
    markers = zip(ranges, items, strict=True)
    return length + sum(
        len(item.tokens) - (stop - start) for (start, stop), item in markers if stop <= length
    )
