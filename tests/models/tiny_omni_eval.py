"""Evaluates a tiny omni model, greedily through mlx-vlm, on sounds that were not trained on.

`python -m tests.models.tiny_omni_eval DIR` prints the table that README.md quotes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.models import tiny_dialogues
from tests.models.tiny_dialogue import Dialogue
from tests.models.tiny_dialogues import SECOND_SHARES, Mix
from tests.models.tiny_media_eval import Case, count
from tests.models.tiny_omni_tasks import COLOURS, SOUNDS, play, sound_dialogue
from tests.models.tiny_vision_eval import kind_of
from tests.models.tiny_vision_tasks import colour_dialogue, paint

_KINDS, _COLOURS = list(SOUNDS), list(COLOURS)


def _sound_kind(dialogue: Dialogue, count: int) -> str:
    turns = sum(message["role"] == "user" for message in dialogue.messages)
    return "sounds of two turns" if turns > 1 else ("one sound", "two sounds")[count - 1]


def cases(each: int) -> Iterator[Case]:
    """The questions of the evaluation, the same every time: `each` of every kind."""
    rng = random.Random(99)
    left = dict.fromkeys(("one sound", "two sounds", "sounds of two turns"), each)
    while any(left.values()):
        seen = sound_dialogue(rng, _KINDS, 0)
        kind = _sound_kind(seen.dialogue, len(seen.pictures))
        sounds = [play(rng, _KINDS[place], rng.uniform(0.2, 1.5)) for place in seen.pictures]
        if left[kind]:
            left[kind] -= 1
            yield Case(kind, seen.dialogue, sounds=sounds)
    left = dict.fromkeys(("one picture", "two pictures"), each)
    while any(left.values()):
        seen = colour_dialogue(rng, _COLOURS)
        kind = kind_of(seen)
        images = [paint(rng, _COLOURS[place], rng.randint(20, 300), 90) for place in seen.pictures]
        if left.get(kind):
            left[kind] -= 1
            yield Case(kind, seen.dialogue, images)
    drawn = (tiny_dialogues.draw(rng, Mix(SECOND_SHARES)) for _ in range(each))
    for dialogue in drawn:
        if not dialogue.endless and len(dialogue.answer) < 150:
            yield Case("text alone", dialogue)


if __name__ == "__main__":
    count(__doc__, cases)
