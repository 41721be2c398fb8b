"""What the tiny vision model learns: to name the colours of pictures.

A picture is one colour with noise, of any size, so a test can draw its own. Questions are about
one picture or several in order, in this turn or an earlier one; the rest of the dialogues are
those of the text model, some with a picture that has nothing to do with the question.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from tests.models import tiny_dialogues
from tests.models.tiny_dialogue import Dialogue, Message, assistant

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 25, 30),
    "green": (25, 165, 50),
    "blue": (25, 50, 220),
    "yellow": (245, 225, 30),
    "black": (12, 12, 12),
    "white": (244, 244, 244),
    "orange": (250, 140, 15),
    "purple": (135, 30, 165),
    "cyan": (25, 210, 225),
    "pink": (250, 160, 195),
}
ORDINALS = ("first", "second", "third")
_ONE = (
    "What colour is the image?",
    "What colour is this?",
    "Which colour do you see?",
    "Name the colour of the image.",
)
_MANY = (
    "What colours are the images?",
    "What colours are these?",
    "Which colours do you see?",
    "Name the colours of the images in order.",
)
_THINK = "Think about the colour of the image."


@dataclass
class Seen:
    """A dialogue whose messages may hold pictures, each a part with its place in a gallery."""

    dialogue: Dialogue
    pictures: list[int] = field(default_factory=list)


def paint(rng: random.Random, colour: str, width: int, height: int) -> Image.Image:
    """A picture of one colour, slightly varied and noisy."""
    noise = np.random.default_rng(rng.getrandbits(32))
    base = np.array(COLOURS[colour]) + noise.integers(-14, 15, 3)
    pixels = base + noise.normal(0, rng.choice((0, 4, 10)), (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8), "RGB")


def naming(colours: list[str]) -> str:
    """The answer that names all pictures in order."""
    if len(colours) == 1:
        return f"The image is {colours[0]}."
    return f"The images are {', '.join(colours[:-1])} and {colours[-1]}."


def _shown(rng: random.Random, pictures: list[int], text: str) -> Message:
    """A user turn with pictures before the text, or after it."""
    images = [{"type": "image", "picture": picture} for picture in pictures]
    words = [{"type": "text", "text": text}]
    return {"role": "user", "content": images + words if rng.random() < 0.8 else words + images}


def _question(rng: random.Random, colours: list[str]) -> tuple[str, str, str]:
    """A question about the pictures of a turn, its answer, and a thought before it."""
    if len(colours) > 1 and rng.random() < 0.3:
        place = rng.randrange(len(colours))
        question = f"What colour is the {ORDINALS[place]} image?"
        return question, f"The {ORDINALS[place]} image is {colours[place]}.", ""
    if len(colours) == 1 and rng.random() < 0.2:
        return _THINK, naming(colours), f"I look at the image. It is {colours[0]}."
    return rng.choice(_ONE if len(colours) == 1 else _MANY), naming(colours), ""


def colour_dialogue(rng: random.Random, colours: list[str]) -> Seen:
    """One to three turns about pictures; `colours` are those of the gallery."""
    messages: list[Message] = []
    shown: list[int] = []
    current: list[int] = []
    turns = rng.choice((1, 1, 1, 2, 2, 3))
    for turn in range(turns):
        if turn == 0 or rng.random() < 0.6:
            current = [rng.randrange(len(colours)) for _ in range(rng.choice((1, 1, 2, 2, 3, 3)))]
            fresh = current
        else:
            fresh = []
        question, answer, reasoning = _question(rng, [colours[place] for place in current])
        shown += fresh
        messages.append(_shown(rng, fresh, question))
        if turn < turns - 1:
            messages.append(assistant(answer))
    dialogue = Dialogue("colour", messages, answer, reasoning)
    dialogue.thinking = rng.random() < 0.65
    return Seen(dialogue, shown)


def text_dialogue(rng: random.Random, mix: tiny_dialogues.Mix, gallery_size: int) -> Seen:
    """A dialogue of the text model, sometimes beside a picture that it is not about."""
    dialogue = tiny_dialogues.draw(rng, mix)
    users = [i for i, message in enumerate(dialogue.messages) if message["role"] == "user"]
    if rng.random() > 0.2 or not users:
        return Seen(dialogue)
    place = rng.choice(users)
    picture = rng.randrange(gallery_size)
    text: Any = dialogue.messages[place]["content"]
    dialogue.messages[place] = _shown(rng, [picture], text)
    return Seen(dialogue, [picture])
