"""The committed omni checkpoint distinguishes sounds, in mlx-vlm's own loader and generate."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.tiny_dialogue import Dialogue, ask, assistant
from tests.models.tiny_media_eval import answer, load
from tests.models.tiny_omni_files import config, template
from tests.models.tiny_omni_tasks import COLOURS, SOUNDS, heard, play, telling
from tests.models.tiny_vision_tasks import paint

DIRECTORY = Path(__file__).parent / "tiny_omni"


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load(DIRECTORY)


def sound(kind: str, seed: int = 0, seconds: float = 0.6) -> np.ndarray:
    return play(random.Random(f"{kind} {seed}"), kind, seconds)


def test_the_checkpoint_has_the_trainers_template() -> None:
    assert (DIRECTORY / "chat_template.jinja").read_text() == template()


@pytest.mark.parametrize("kind", SOUNDS)
@pytest.mark.parametrize("seconds", [0.3, 0.75, 1.37])
def test_it_names_one_sound(loaded: tuple[Any, Any], kind: str, seconds: float) -> None:
    dialogue = Dialogue("sound", [heard(1, "What is the sound like?")])
    assert answer(*loaded, dialogue, [], [sound(kind, 0, seconds)]) == telling([kind])


@pytest.mark.parametrize(
    "kinds", [("low", "high"), ("high", "low"), ("noisy", "high"), ("low", "low")]
)
def test_it_names_two_in_order(loaded: tuple[Any, Any], kinds: tuple[str, str]) -> None:
    sounds = [sound(kind, seed, 0.4 + 0.3 * seed) for seed, kind in enumerate(kinds)]
    dialogue = Dialogue("sound", [heard(2, "What are the sounds like?")])
    assert answer(*loaded, dialogue, [], sounds) == telling(list(kinds))


def test_it_knows_a_sound_of_an_earlier_turn_and_a_new_one(
    loaded: tuple[Any, Any],
) -> None:
    first = heard(1, "What is the sound like?")
    said = assistant("The sound is low.")
    again = Dialogue("sound", [first, said, heard(0, "What is the sound like?")])
    assert answer(*loaded, again, [], [sound("low")]) == "The sound is low."
    other = Dialogue("sound", [first, said, heard(1, "What is the sound like?")])
    assert answer(*loaded, other, [], [sound("low"), sound("high")]) == "The sound is high."


@pytest.mark.parametrize("colour", COLOURS)
def test_it_names_the_colour_of_an_image(loaded: tuple[Any, Any], colour: str) -> None:
    words = {"type": "text", "text": "What colour is the image?"}
    dialogue = Dialogue("colour", [{"role": "user", "content": [{"type": "image"}, words]}])
    image = paint(random.Random(colour), colour, 60, 44)
    assert answer(*loaded, dialogue, [image], []) == f"The image is {colour}."


def test_it_still_answers_without_a_sound(loaded: tuple[Any, Any]) -> None:
    capital = ask("capital", "What is the capital of France?", "The capital of France is Paris.")
    assert answer(*loaded, capital, [], []) == capital.answer


def test_its_vocabulary_equals_that_of_the_tokenizer(loaded: tuple[Any, Any]) -> None:
    assert len(loaded[1].tokenizer) == config()["vocab_size"]
