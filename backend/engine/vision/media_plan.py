"""Where the media of a prompt stand in its tokens, and what tells two such prompts apart.

Plain data, made on a prompt thread and read on the engine thread.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, video or sound as the model's processor prepared it.

    kind: image, video or audio. digest: of its content (32 bytes). whole: what stands for it, as
    the encoder wants it. first, count: which of these are put into a prompt; the rest is text
    around it. arrays: what the encoder takes, by the processor's names; NumPy arrays stand for
    arrays of MLX. nbytes: of those.
    """

    kind: str
    digest: bytes
    whole: tuple[int, ...]
    first: int
    count: int
    arrays: Mapping[str, Any]
    nbytes: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """What stands for it in a prompt, with the marks around it."""
        return self.whole[self.first : self.first + self.count]

    @property
    def key(self) -> tuple[int, ...]:
        """Numbers in place of its tokens, for caches: negative, and drawn from its content."""
        words = [-1 - (word & 0x7FFFFFFF) for word in struct.unpack("<8I", self.digest)]
        return tuple(itertools.islice(itertools.cycle(words), len(self.tokens)))


@dataclass(frozen=True, slots=True)
class Span:
    """An item and the place of its first token in the prompt."""

    start: int
    item: MediaItem

    @property
    def stop(self) -> int:
        return self.start + len(self.item.tokens)


class MediaPlan:
    """The media of one prompt, in the order of their places.

    key: the prompt's tokens with every item's `key` in place of its tokens: two prompts share a
    prefix of their KV exactly where their keys are equal.
    """

    def __init__(self, tokens: Sequence[int], spans: Sequence[Span]) -> None:
        self.spans: tuple[Span, ...] = tuple(spans)
        key = list(tokens)
        for span in self.spans:
            key[span.start : span.stop] = span.item.key
        self.key: tuple[int, ...] = tuple(key)

    def before(self, length: int) -> int:
        """The longest prefix of at most `length` tokens that ends within no item."""
        for span in self.spans:
            if span.start < length < span.stop:
                return span.start
        return length


def spliced(
    tokens: Sequence[int], places: Sequence[tuple[int, int]], items: Sequence[MediaItem]
) -> tuple[list[int], list[Span]]:
    """The prompt with each item's tokens where its marker stands.

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
    """The length of a prompt's beginning once the items before its end are `spliced` into it."""
    before = zip(places, items, strict=True)
    return length + sum(
        len(item.tokens) - (stop - start) for (start, stop), item in before if stop <= length
    )
