"""Shows a tiny vision model pictures that it never saw, greedily through mlx-vlm, and counts.

`python -m tests.models.tiny_vision_eval DIR` prints the table that README.md quotes. Answers are
compared letter by letter.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm

from tests.models import tiny_dialogues
from tests.models.tiny_batches import prompt_of
from tests.models.tiny_dialogue import Dialogue
from tests.models.tiny_dialogues import SECOND_SHARES, Mix
from tests.models.tiny_vision_tasks import COLOURS, Seen, colour_dialogue, paint

_GALLERY = list(COLOURS)


@dataclass(frozen=True)
class Case:
    kind: str
    dialogue: Dialogue
    images: list[Any]


def load(directory: Path) -> tuple[Any, Any]:
    """Model, in float32 as on every CPU, and processor, through mlx-vlm's own loader."""
    model, processor = mlx_vlm.load(str(directory))
    model.set_dtype(mx.float32)
    return model, processor


def answer(model: Any, processor: Any, dialogue: Dialogue, images: list[Any]) -> str:
    """What the model writes, greedily, to the end of its turn."""
    prompt = prompt_of(processor.tokenizer, dialogue)
    said = mlx_vlm.generate(
        model, processor, prompt, images or None, max_tokens=80, temperature=0.0, verbose=False
    )
    text: str = said.text
    return text


def kind_of(seen: Seen) -> str:
    if not seen.pictures:
        return "no picture"
    turns = sum(message["role"] == "user" for message in seen.dialogue.messages)
    if turns > 1:
        return "in a later turn"
    return {1: "one picture", 2: "two pictures", 3: "three pictures"}[len(seen.pictures)]


def cases(each: int) -> Iterator[Case]:
    """The same questions every time: `each` of every kind."""
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
            yield Case("no picture", dialogue, [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--each", type=int, default=60, help="questions of every kind")
    parser.add_argument("--wrong", type=int, default=0, help="wrong answers to print")
    arguments = parser.parse_args()
    model, processor = load(arguments.directory)
    tally: dict[str, list[int]] = {}
    for case in cases(arguments.each):
        text = answer(model, processor, case.dialogue, case.images)
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
