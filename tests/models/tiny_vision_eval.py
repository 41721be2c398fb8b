"""Evaluates a tiny vision model, greedily through mlx-vlm, on pictures that were not trained on.

`python -m tests.models.tiny_vision_eval DIR` prints the table that README.md quotes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.models import tiny_dialogues
from tests.models.tiny_dialogues import SECOND_SHARES, Mix
from tests.models.tiny_media_eval import Case, count
from tests.models.tiny_vision_tasks import COLOURS, Seen, colour_dialogue, paint

_GALLERY = list(COLOURS)


def kind_of(seen: Seen) -> str:
    if not seen.pictures:
        return "no picture"
    turns = sum(message["role"] == "user" for message in seen.dialogue.messages)
    if turns > 1:
        return "in a later turn"
    return {1: "one picture", 2: "two pictures", 3: "three pictures"}[len(seen.pictures)]


def cases(each: int) -> Iterator[Case]:
    """The questions of the evaluation, the same every time: `each` of every kind."""
    rng = random.Random(99)
    left = dict.fromkeys(("one picture", "two pictures", "three pictures", "in a later turn"), each)
    while any(left.values()):
        seen = colour_dialogue(rng, _GALLERY)
        kind = kind_of(seen)
        images = [
            paint(rng, _GALLERY[picture], rng.randint(20, 300), rng.randint(20, 300))
            for picture in seen.pictures
        ]
        if left[kind]:
            left[kind] -= 1
            yield Case(kind, seen.dialogue, images)
    mix = Mix(SECOND_SHARES)
    drawn = (tiny_dialogues.draw(rng, mix) for _ in range(each))
    for dialogue in drawn:
        if not dialogue.endless and len(dialogue.answer) < 150:
            yield Case("no picture", dialogue)


if __name__ == "__main__":
    count(__doc__, cases)
