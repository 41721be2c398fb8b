"""Plays a tiny omni model sounds that it never heard, greedily through mlx-vlm, and counts.

`python -m tests.models.tiny_omni_eval DIR` prints the table that README.md quotes. Answers are
compared letter by letter.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_vlm

from tests.models import tiny_dialogues
from tests.models.tiny_batches import prompt_of
from tests.models.tiny_dialogue import Dialogue
from tests.models.tiny_dialogues import SECOND_SHARES, Mix
from tests.models.tiny_omni_tasks import COLOURS, SOUNDS, play, sound_dialogue
from tests.models.tiny_vision_eval import kind_of, load
from tests.models.tiny_vision_tasks import colour_dialogue, paint

_KINDS, _COLOURS = list(SOUNDS), list(COLOURS)


@dataclass(frozen=True)
class Case:
    kind: str
    dialogue: Dialogue
    images: list[Any]
    sounds: list[Any]


def answer(
    model: Any, processor: Any, dialogue: Dialogue, images: list[Any], sounds: list[Any]
) -> str:
    """What the model writes, greedily, to the end of its turn. Sounds are samples."""
    said = mlx_vlm.generate(
        model,
        processor,
        prompt_of(processor.tokenizer, dialogue),
        images or None,
        sounds or None,
        max_tokens=80,
        temperature=0.0,
        verbose=False,
    )
    text: str = said.text
    return text


def _sound_kind(dialogue: Dialogue, count: int) -> str:
    turns = sum(message["role"] == "user" for message in dialogue.messages)
    return "sounds of two turns" if turns > 1 else ("one sound", "two sounds")[count - 1]


def cases(each: int) -> Iterator[Case]:
    """The same questions every time: `each` of every kind."""
    rng = random.Random(99)
    left = dict.fromkeys(("one sound", "two sounds", "sounds of two turns"), each)
    while any(left.values()):
        seen = sound_dialogue(rng, _KINDS, 0)
        kind = _sound_kind(seen.dialogue, len(seen.pictures))
        sounds = [play(rng, _KINDS[place], rng.uniform(0.2, 1.5)) for place in seen.pictures]
        if left[kind]:
            left[kind] -= 1
            yield Case(kind, seen.dialogue, [], sounds)
    left = dict.fromkeys(("one picture", "two pictures"), each)
    while any(left.values()):
        seen = colour_dialogue(rng, _COLOURS)
        kind = kind_of(seen)
        images = [paint(rng, _COLOURS[place], rng.randint(20, 300), 90) for place in seen.pictures]
        if left.get(kind):
            left[kind] -= 1
            yield Case(kind, seen.dialogue, images, [])
    drawn = (tiny_dialogues.draw(rng, Mix(SECOND_SHARES)) for _ in range(each))
    for dialogue in drawn:
        if not dialogue.endless and len(dialogue.answer) < 150:
            yield Case("text alone", dialogue, [], [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--each", type=int, default=60, help="questions of every kind")
    parser.add_argument("--wrong", type=int, default=0, help="wrong answers to print")
    arguments = parser.parse_args()
    model, processor = load(arguments.directory)
    tally: dict[str, list[int]] = {}
    for case in cases(arguments.each):
        text = answer(model, processor, case.dialogue, case.images, case.sounds)
        count = tally.setdefault(case.kind, [0, 0])
        count[0] += text == case.dialogue.answer
        count[1] += 1
        if text != case.dialogue.answer and arguments.wrong:
            arguments.wrong -= 1
            print(f"{case.kind}: expected {case.dialogue.answer!r}\n  got {text!r}")
    print("| kind | right | asked |\n|---|---|---|")
    for kind, (right, asked) in tally.items():
        print(f"| {kind} | {right} | {asked} |")


if __name__ == "__main__":
    main()
