"""Turns dialogues into padded batches of tokens with a weight for each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.models import tiny_dialogues
from tests.models.tiny_dialogue import Dialogue
from tests.models.tiny_tokenizer import TURN_END

PROMPT_WEIGHT = 0.03
STOP_SHARE = 1 / 30
LONGEST = 1024
_POOL = 1536
_LENGTH_STEP = 32
_WIDEST_GAP = 3000


@dataclass(frozen=True)
class Example:
    """One dialogue as tokens; positions jump by `gap` at token `gap_at`."""

    tokens: list[int]
    answer_from: int
    gap_at: int
    gap: int
    padded: bool


@dataclass(frozen=True)
class Batch:
    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def prompt_of(tokenizer: Any, dialogue: Dialogue) -> str:
    """The rendered prompt, up to where the model starts to write."""
    prompt: str = tokenizer.apply_chat_template(
        dialogue.messages,
        tools=dialogue.tools or None,
        add_generation_prompt=True,
        enable_thinking=dialogue.thinking,
        tokenize=False,
    )
    return prompt


def encode(tokenizer: Any, dialogue: Dialogue, rng: random.Random) -> Example:
    """Tokens of prompt and answer.

    Half of the prompts with a filler get a gap in their positions in the middle of it: the
    question is then as far from the start as in a much longer prompt, for the price of
    a short one.
    """
    prompt = prompt_of(tokenizer, dialogue)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    end = "" if dialogue.endless else TURN_END
    answer = tokenizer.encode(dialogue.answer + end, add_special_tokens=False)
    gap_at = gap = 0
    if dialogue.filler and rng.random() < 0.5:
        middle = prompt.index(dialogue.filler) + len(dialogue.filler) // 2
        gap_at = len(tokenizer.encode(prompt[:middle], add_special_tokens=False))
        gap = rng.randint(0, _WIDEST_GAP)
    return Example(ids + answer, len(ids), gap_at, gap, bool(dialogue.filler))


def _collate(examples: list[Example], stop_tokens: list[int]) -> Batch:
    """Pad to one length; the end of a long answer gets more weight, or it would not be learned."""
    longest = max(len(example.tokens) for example in examples) - 1
    length = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    shape = (len(examples), length)
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    weights = np.zeros(shape, np.float32)
    positions = np.tile(np.arange(length, dtype=np.int32), (len(examples), 1))
    for row, example in enumerate(examples):
        used = len(example.tokens) - 1
        tokens[row, :used] = example.tokens[:-1]
        targets[row, :used] = example.tokens[1:]
        start = example.answer_from - 1
        weights[row, :start] = 0 if example.padded else PROMPT_WEIGHT
        weights[row, start:used] = 1
        stops = start + np.flatnonzero(np.isin(targets[row, start:used], stop_tokens))
        weights[row, stops] += (used - start) * STOP_SHARE
        positions[row, example.gap_at :] += example.gap
    return Batch(tokens, positions, targets, weights)


def batches(
    tokenizer: Any, rng: random.Random, size: int, mix: tiny_dialogues.Mix
) -> Iterator[Batch]:
    """Batches of about `size` tokens, with dialogues of similar length from one new pool."""
    stop_tokens = tokenizer.convert_tokens_to_ids([TURN_END, "</think>"])
    pool: list[Example] = []
    while len(pool) < _POOL:
        dialogue = tiny_dialogues.draw(rng, mix)
        example = encode(tokenizer, dialogue, rng)
        if len(example.tokens) <= LONGEST:
            pool.append(example)
    pool.sort(key=lambda example: len(example.tokens))
    groups: list[list[Example]] = [[]]
    for example in pool:
        if (len(groups[-1]) + 1) * len(example.tokens) > size:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    for group in groups:
        yield _collate(group, stop_tokens)
