"""Turns dialogues with images and sounds into padded batches, in MiniCPM-o's layout."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from tests.models import tiny_dialogues
from tests.models.tiny_batches import prompt_of
from tests.models.tiny_omni_files import AUDIO_MARKER, IMAGE_MARKER
from tests.models.tiny_omni_senses import Collection
from tests.models.tiny_omni_tasks import sound_dialogue
from tests.models.tiny_tokenizer import TURN_END
from tests.models.tiny_vision_batches import LONGEST, MIX, POOL, Example, grouped
from tests.models.tiny_vision_tasks import Seen, colour_dialogue

_TEXT_SHARE, _COLOUR_SHARE = 0.2, 0.25
_MARKER = re.compile(f"{re.escape(IMAGE_MARKER)}|{re.escape(AUDIO_MARKER)}")


def encode(tokenizer: Any, collection: Collection, seen: Seen) -> Example:
    """Tokens and their positions, with the item's tokens in place of each marker."""
    items = iter(seen.pictures)
    text = _MARKER.sub(lambda _: collection.texts[next(items)], prompt_of(tokenizer, seen.dialogue))
    if next(items, None) is not None:
        raise ValueError("an item of the dialogue has no place in its prompt")
    prompt = tokenizer.encode(text, add_special_tokens=False)
    end = "" if seen.dialogue.endless else TURN_END
    answer = tokenizer.encode(seen.dialogue.answer + end, add_special_tokens=False)
    places = np.zeros(len(prompt) + len(answer), np.int32)
    begins = iter(np.flatnonzero(np.isin(prompt, _begin_ids(tokenizer))) + 1)
    for item, begin in zip(seen.pictures, begins, strict=True):
        rows = collection.rows[item]
        places[begin : begin + len(rows)] = rows
    positions = np.broadcast_to(np.arange(len(places), dtype=np.int32), (3, len(places)))
    return Example(prompt + answer, len(prompt), places.tolist(), positions)


def _begin_ids(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer.convert_tokens_to_ids(["<image>", "<|audio_start|>"])
    return ids


def batches(tokenizer: Any, collection: Collection, rng: random.Random) -> Iterator[list[mx.array]]:
    """Batches from one pool of newly drawn dialogues."""
    pool: list[Example] = []
    while len(pool) < POOL:
        kind = rng.random()
        if kind < _TEXT_SHARE:
            seen = Seen(tiny_dialogues.draw(rng, MIX))
        elif kind < _TEXT_SHARE + _COLOUR_SHARE:
            seen = colour_dialogue(rng, collection.colours)
        else:
            seen = sound_dialogue(rng, collection.kinds, len(collection.colours))
        example = encode(tokenizer, collection, seen)
        if len(example.tokens) <= LONGEST:
            pool.append(example)
    yield from grouped(pool, tokenizer.convert_tokens_to_ids([TURN_END, "</think>"]), rng)
