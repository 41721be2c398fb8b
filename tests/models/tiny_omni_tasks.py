"""What the tiny omni model learns: whether sounds are low, high or noisy.

A sound is a tone of any loudness within its range, or noise, so a test can make its own. Questions
are about one sound or two in order, in this turn or an earlier one; the rest are
the vision model's questions about colours, and those of the text model.
"""

from __future__ import annotations

import io
import random
import wave
from typing import Any

import numpy as np

from tests.models.tiny_dialogue import Dialogue, Message, assistant
from tests.models.tiny_vision_tasks import ORDINALS, Seen

RATE = 16000
# Hz; noise has no pitch.
SOUNDS: dict[str, tuple[float, float] | None] = {
    "low": (150, 400),
    "high": (1800, 3600),
    "noisy": None,
}
COLOURS = ("red", "green", "blue", "yellow")
_ONE = ("What is the sound like?", "What does this sound like?", "Is the sound high or low?")
_MANY = ("What are the sounds like?", "What do these sound like?", "Name the sounds in order.")


def play(rng: random.Random, kind: str, seconds: float) -> np.ndarray:
    """A sound as float32 samples of RATE a second, between -1 and 1."""
    noise = np.random.default_rng(rng.getrandbits(32))
    count = round(seconds * RATE)
    loudness = rng.uniform(0.1, 0.8)
    reach = SOUNDS[kind]
    if reach is None:
        samples = noise.uniform(-1, 1, count) * loudness
    else:
        phase = np.arange(count) / RATE * rng.uniform(*reach) + rng.random()
        samples = np.sin(2 * np.pi * phase) * loudness + noise.normal(0, 0.002, count)
    return np.clip(samples, -1, 1).astype(np.float32)


def wav(samples: np.ndarray) -> bytes:
    """A WAV file of 16 bits, one channel."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def telling(kinds: list[str]) -> str:
    """The answer that names all sounds in order."""
    if len(kinds) == 1:
        return f"The sound is {kinds[0]}."
    return f"The sounds are {', '.join(kinds[:-1])} and {kinds[-1]}."


def heard(count: int, text: str) -> Message:
    """A user message with sounds before the text."""
    sounds: list[dict[str, Any]] = [{"type": "audio"} for _ in range(count)]
    return {"role": "user", "content": [*sounds, {"type": "text", "text": text}]}


def _question(rng: random.Random, kinds: list[str]) -> tuple[str, str]:
    if len(kinds) > 1 and rng.random() < 0.3:
        place = rng.randrange(len(kinds))
        question = f"What is the {ORDINALS[place]} sound like?"
        return question, f"The {ORDINALS[place]} sound is {kinds[place]}."
    return rng.choice(_ONE if len(kinds) == 1 else _MANY), telling(kinds)


def sound_dialogue(rng: random.Random, kinds: list[str], first: int) -> Seen:
    """One or two turns about sounds.

    kinds: of the sounds to choose from; `first` is the place of the first one in the collection."""
    messages: list[Message] = []
    played: list[int] = []
    current: list[int] = []
    turns = rng.choice((1, 1, 1, 2))
    for turn in range(turns):
        fresh: list[int] = []
        if turn == 0 or rng.random() < 0.6:
            fresh = current = [rng.randrange(len(kinds)) for _ in range(rng.choice((1, 1, 2, 2)))]
        question, answer = _question(rng, [kinds[place] for place in current])
        played += [first + place for place in fresh]
        messages.append(heard(len(fresh), question))
        if turn < turns - 1:
            messages.append(assistant(answer))
    dialogue = Dialogue("sound", messages, answer)
    dialogue.thinking = rng.random() < 0.4
    return Seen(dialogue, played)
