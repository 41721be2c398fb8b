"""Counts a tiny vision or audio model's right answers, greedily through mlx-vlm.

Answers are compared letter by letter. The printed table is the one in the READMEs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm

from tests.models.tiny_batches import prompt_of
from tests.models.tiny_dialogue import Dialogue


@dataclass(frozen=True)
class Case:
    """A question with its images and sounds."""

    kind: str
    dialogue: Dialogue
    images: list[Any] = field(default_factory=list)
    sounds: list[Any] = field(default_factory=list)


def count(description: str | None, cases: Callable[[int], Iterator[Case]]) -> None:
    """The program: `python -m … DIR`. cases: that many questions of every kind."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--each", type=int, default=60, help="questions of every kind")
    parser.add_argument("--wrong", type=int, default=0, help="wrong answers to print")
    arguments = parser.parse_args()
    model, processor = load(arguments.directory)
    tally: dict[str, list[int]] = {}
    for case in cases(arguments.each):
        text = answer(model, processor, case.dialogue, case.images, case.sounds)
        right = tally.setdefault(case.kind, [0, 0])
        right[0] += text == case.dialogue.answer
        right[1] += 1
        if text != case.dialogue.answer and arguments.wrong:
            arguments.wrong -= 1
            print(f"{case.kind}: expected {case.dialogue.answer!r}\n  got {text!r}")
    print("| kind | right | asked |\n|---|---|---|")
    for kind, (right_ones, asked) in tally.items():
        print(f"| {kind} | {right_ones} | {asked} |")


def load(directory: Path) -> tuple[Any, Any]:
    """The model, in float32 as on every CPU, and its processor, through mlx-vlm's own loader."""
    model, processor = mlx_vlm.load(str(directory))
    model.set_dtype(mx.float32)
    return model, processor


def answer(
    model: Any,
    processor: Any,
    dialogue: Dialogue,
    images: Sequence[Any] = (),
    sounds: Sequence[Any] = (),
) -> str:
    """The model's greedy answer, to the end of its turn. Sounds are samples."""
    said = mlx_vlm.generate(
        model,
        processor,
        prompt_of(processor.tokenizer, dialogue),
        list(images) or None,
        list(sounds) or None,
        max_tokens=80,
        temperature=0.0,
        verbose=False,
    )
    text: str = said.text
    return text
