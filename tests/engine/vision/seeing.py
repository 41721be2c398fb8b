"""The engine with the small vision model, and pictures for it."""

from __future__ import annotations

import base64
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from backend.engine.engine import Engine
from backend.engine.events import Event, Finished, TextDelta
from backend.engine.load_request import LoadRequest
from backend.engine.request import Attachments, ChatPrompt, GenerationRequest, Prompt, Sampling
from tests.models.tiny_vision_tasks import paint

TINY_VISION = Path(__file__).parents[2] / "models" / "tiny_vision"
ONE, MANY = "What colour is the image?", "What colours are the images?"
GREEDY = Sampling(temperature=0)


@dataclass(frozen=True)
class Outcome:
    """What one request returned."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    logprobs: tuple[float, ...]


def picture(colour: str, seed: int = 0) -> Any:
    """A picture (PIL) of one colour with noise, always the same for a seed."""
    return paint(random.Random(f"{colour} {seed}"), colour, 60, 44)


def encoded(image: Any) -> str:
    """The base64 of its PNG."""
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def tone(hertz: int) -> str:
    """The base64 of a WAV: half a second of one tone."""
    buffer = BytesIO()
    soundfile.write(buffer, samples_of(hertz), 16_000, format="WAV", subtype="FLOAT")
    return base64.b64encode(buffer.getvalue()).decode()


def samples_of(hertz: int) -> np.ndarray:
    """The samples of `tone`, at 16 kHz."""
    return (np.sin(np.arange(8000) / 16_000 * 2 * np.pi * hertz) / 2).astype(np.float32)


def shown(*colours: str, **fields: Any) -> Attachments:
    """Different pictures of these colours."""
    images = tuple(encoded(picture(colour, seed)) for seed, colour in enumerate(colours))
    return Attachments(images, **fields)


def turns(*texts: str) -> tuple[dict[str, str], ...]:
    """Messages that alternate between user and assistant."""
    roles = ("user", "assistant")
    return tuple({"role": roles[at % 2], "content": text} for at, text in enumerate(texts))


def asking(
    prompt: Prompt | str, attachments: Attachments | None = None, **fields: Any
) -> GenerationRequest:
    """A greedy request; a text is sent as a single user message."""
    if isinstance(prompt, str):
        prompt = ChatPrompt(turns(prompt), template_arguments={"enable_thinking": False})
    settings: dict[str, Any] = {"sampling": GREEDY, "max_tokens": 40, "logprobs": 0}
    return GenerationRequest("it", prompt, attachments=attachments, **(settings | fields))


@asynccontextmanager
async def seeing(path: Path = TINY_VISION, **settings: Any) -> AsyncIterator[Engine]:
    """An engine with the model loaded."""
    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest(path.name, str(path), settings=settings))
        yield engine
    finally:
        await engine.stop(10)


async def answer_to(engine: Engine, request: GenerationRequest) -> Outcome:
    """The whole answer. Raises the request's EngineError."""
    async with engine.submit(request) as generation:
        events: Sequence[Event] = [event async for event in generation]
    last = events[-1]
    assert isinstance(last, Finished)
    return Outcome(
        "".join(event.text for event in events if isinstance(event, TextDelta)),
        tuple(one.token for one in last.logprobs or ()),
        last.usage.prompt_tokens,
        last.usage.cached_tokens,
        tuple(one.logprob for one in last.logprobs or ()),
    )
