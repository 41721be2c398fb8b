"""The committed vision checkpoint names colours, through mlx-vlm's own loader and generate."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.models.tiny_dialogue import Dialogue, ask, assistant
from tests.models.tiny_media_eval import answer, load
from tests.models.tiny_vision_files import config, template
from tests.models.tiny_vision_tasks import COLOURS, naming, paint

DIRECTORY = Path(__file__).parent / "tiny_vision"


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load(DIRECTORY)


def shown(pictures: int, text: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in range(pictures)]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def picture(colour: str, seed: int = 0) -> Image.Image:
    return paint(random.Random(f"{colour} {seed}"), colour, 60 + 7 * seed, 44)


def test_the_checkpoint_has_the_trainers_template() -> None:
    assert (DIRECTORY / "chat_template.jinja").read_text() == template()


@pytest.mark.parametrize("colour", COLOURS)
def test_it_names_the_colour_of_one_image(loaded: tuple[Any, Any], colour: str) -> None:
    dialogue = Dialogue("colour", [shown(1, "What colour is the image?")])
    assert answer(*loaded, dialogue, [picture(colour)]) == f"The image is {colour}."


@pytest.mark.parametrize(
    "colours", [("red", "blue"), ("blue", "red"), ("white", "black"), ("green", "green")]
)
def test_it_names_two_in_order(loaded: tuple[Any, Any], colours: tuple[str, str]) -> None:
    images = [picture(colour, seed) for seed, colour in enumerate(colours)]
    dialogue = Dialogue("colour", [shown(2, "What colours are the images?")])
    assert answer(*loaded, dialogue, images) == naming(list(colours))


def test_it_knows_an_image_of_an_earlier_turn_and_a_new_one(
    loaded: tuple[Any, Any],
) -> None:
    first = shown(1, "What colour is the image?")
    said = assistant("The image is purple.")
    again = Dialogue("colour", [first, said, shown(0, "What colour is this?")])
    assert answer(*loaded, again, [picture("purple")]) == "The image is purple."
    other = Dialogue("colour", [first, said, shown(1, "What colour is this?")])
    images = [picture("purple"), picture("yellow")]
    assert answer(*loaded, other, images) == "The image is yellow."


def test_it_still_answers_without_an_image(loaded: tuple[Any, Any]) -> None:
    capital = ask("capital", "What is the capital of France?", "The capital of France is Paris.")
    assert answer(*loaded, capital, []) == capital.answer


def test_its_vocabulary_equals_that_of_the_tokenizer(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1].tokenizer
    expected = config()
    assert len(tokenizer) == expected["vocab_size"]
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == expected["image_token_id"]
