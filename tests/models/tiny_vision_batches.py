"""Turns dialogues with pictures into padded batches, as Qwen3-VL would lay them out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from tests.models.tiny_batches import PROMPT_WEIGHT, STOP_SHARE, prompt_of
from tests.models.tiny_dialogue import Words
from tests.models.tiny_dialogues import SECOND_SHARES, Mix
from tests.models.tiny_tokenizer import TURN_END
from tests.models.tiny_vision_gallery import Gallery
from tests.models.tiny_vision_tasks import Seen, colour_dialogue, text_dialogue

_TOKENS_PER_STEP = 2048
LONGEST = 512
POOL = 512
_TEXT_SHARE = 0.25
MIX = Mix(SECOND_SHARES, Words(clutter=0.4), longest_filler=40, padded_share=0.1)


@dataclass(frozen=True)
class Example:
    """One dialogue. `places[i]` is the row of the gallery behind token i, 0 for text;
    `positions` has the shape (3, tokens): time, row, column."""

    tokens: list[int]
    answer_from: int
    places: list[int]
    positions: np.ndarray


def _positions(places: list[tuple[int, int] | None]) -> np.ndarray:
    """The positions of Qwen3-VL: a picture's cells count rows and columns from where it begins,
    and what follows continues after the largest of them. `None` stands for a token of text."""
    columns: list[tuple[int, int, int]] = []
    following = 0
    for place in places:
        if place is None:
            columns.append((following,) * 3)
            following += 1
            continue
        rows, width = place
        columns += [
            (following, following + row, following + column)
            for row in range(rows)
            for column in range(width)
        ]
        following += max(rows, width)
    return np.array(columns, np.int32).T


def encode(tokenizer: Any, gallery: Gallery, seen: Seen) -> Example:
    """Tokens, with each picture's one placeholder widened to the cells of its grid."""
    prompt = tokenizer.encode(prompt_of(tokenizer, seen.dialogue), add_special_tokens=False)
    end = "" if seen.dialogue.endless else TURN_END
    answer = tokenizer.encode(seen.dialogue.answer + end, add_special_tokens=False)
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    left = iter(seen.pictures)
    tokens: list[int] = []
    places: list[int] = []
    shapes: list[tuple[int, int] | None] = []
    for token in prompt:
        if token == pad:
            picture = next(left)
            size = gallery.size(picture)
            tokens += [pad] * size
            places += range(gallery.starts[picture], gallery.starts[picture] + size)
            shapes.append(gallery.grids[picture])
        else:
            tokens.append(token)
            places.append(0)
            shapes.append(None)
    if next(left, None) is not None:
        raise ValueError("a picture of the dialogue has no place in its prompt")
    begin = len(tokens)
    positions = _positions(shapes + [None] * len(answer))
    return Example(tokens + answer, begin, places + [0] * len(answer), positions)


def _collate(examples: list[Example], stop_tokens: list[int]) -> list[mx.array]:
    longest = max(len(example.tokens) for example in examples) - 1
    length = -(-longest // 32) * 32
    shape = (len(examples), length)
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    places, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    positions = np.zeros((3, *shape), np.int32)
    for row, example in enumerate(examples):
        used, start = len(example.tokens) - 1, example.answer_from - 1
        tokens[row, :used] = example.tokens[:-1]
        targets[row, :used] = example.tokens[1:]
        places[row, :used] = example.places[:-1]
        positions[:, row, :used] = example.positions[:, :-1]
        weights[row, :start] = PROMPT_WEIGHT
        weights[row, :start][np.array(example.places[1 : start + 1], bool)] = 0
        weights[row, start:used] = 1
        stops = start + np.flatnonzero(np.isin(targets[row, start:used], stop_tokens))
        weights[row, stops] += (used - start) * STOP_SHARE
    return [mx.array(part) for part in (tokens, places, positions, targets, weights)]


def grouped(
    pool: list[Example], stop_tokens: list[int], rng: random.Random
) -> Iterator[list[mx.array]]:
    """Batches of examples of similar length."""
    groups: list[list[Example]] = [[]]
    for example in sorted(pool, key=lambda example: len(example.tokens)):
        if (len(groups[-1]) + 1) * len(example.tokens) > _TOKENS_PER_STEP:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    for group in groups:
        yield _collate(group, stop_tokens)


def batches(tokenizer: Any, gallery: Gallery, rng: random.Random) -> Iterator[list[mx.array]]:
    """Batches of one pool of fresh dialogues."""
    stop_tokens = tokenizer.convert_tokens_to_ids([TURN_END, "</think>"])
    pool: list[Example] = []
    while len(pool) < POOL:
        if rng.random() < _TEXT_SHARE:
            seen = text_dialogue(rng, MIX, len(gallery.colours))
        else:
            seen = colour_dialogue(rng, gallery.colours)
        example = encode(tokenizer, gallery, seen)
        if len(example.tokens) <= LONGEST:
            pool.append(example)
    yield from grouped(pool, stop_tokens, rng)
