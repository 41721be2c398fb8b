"""The positions of media in a prompt's tokens, and the key by which caches compare such prompts.

Plain data, created on a prompt thread and read on the engine thread.
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
    """One image, video or sound as the model's processor prepared it.

    kind: image, video or audio.
    digest: of its content (32 bytes).
    whole: its tokens, including text that the processor writes around the item.
    first, count: the part of `whole` that goes into a prompt.
    arrays: the encoder's inputs by the processor's names, with NumPy arrays in place of MLX arrays.
    nbytes: of the arrays.
    encoded: the tokens for the encoder if they are not `whole`, because one token stands for all
        embeddings of the item, or some are beyond the vocabulary.
    bos: how many BOS tokens (0 or 1) the processor wrote; if one token stands for the item, `whole`
        has none of them.
    """

    kind: str
    digest: bytes
    whole: tuple[int, ...]
    first: int
    count: int
    arrays: Mapping[str, Any]
    nbytes: int
    encoded: tuple[int, ...] = ()
    bos: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The item's tokens in a prompt, including the control tokens around them."""
        return self.whole[self.first : self.first + self.count]

    @property
    def key(self) -> tuple[int, ...]:
        """The numbers by which caches compare its tokens: negative, derived from the digest."""
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
    """The media of one prompt, in order.

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
    tokens: Sequence[int], places: Sequence[tuple[int, int]], items: Sequence[MediaItem]
) -> tuple[list[int], list[Span]]:
    """Return the prompt with each marker replaced by its item's tokens, and the items' spans.

    places: (start, stop) of the markers in `tokens`, ascending, one for each item.
    """
    prompt: list[int] = []
    spans: list[Span] = []
    done = 0
    for (start, stop), item in zip(places, items, strict=True):
        prompt += tokens[done:start]
        spans.append(Span(len(prompt), item))
        prompt += item.tokens
        done = stop
    return [*prompt, *tokens[done:]], spans


def grown(length: int, places: Sequence[tuple[int, int]], items: Sequence[MediaItem]) -> int:
    """Return the length that a prefix of `length` tokens has after `spliced`."""
    before = zip(places, items, strict=True)
    return length + sum(
        len(item.tokens) - (stop - start) for (start, stop), item in before if stop <= length
    )
