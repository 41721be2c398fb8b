"""The tiny chat model, its draft model, and questions for both."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

from backend.engine.drafting.batch_drafter import DraftModel, ModelDrafter
from backend.engine.planning.pace import Pace
from tests.models import tiny_dialogues
from tests.models.tiny_batches import prompt_of
from tests.models.tiny_dialogues import Mix

MODELS = Path(__file__).parents[2] / "models"
VOCABULARY = 512


def load(name: str) -> tuple[Any, Any]:
    """A fresh copy of the model in float32, and its tokenizer."""
    model, tokenizer = mlx_lm.load(str(MODELS / name))[:2]
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer


@cache
def text_model() -> tuple[Any, Any]:
    return load("tiny_text")


def draft_model(model: Any = None, **changes: Any) -> DraftModel:
    model = model or _small()
    return DraftModel(
        **{
            "model": model,
            "vocabulary": VOCABULARY,
            "main_vocabulary": VOCABULARY,
            "longest": 8192,
        }
        | changes
    )


@cache
def _small() -> Any:
    return load("tiny_draft")[0]


def model_drafter(most_tokens: int = 512) -> ModelDrafter:
    return ModelDrafter(draft_model(), Pace(most_tokens, 250))


@cache
def prompts(count: int) -> list[list[int]]:
    """Prompts of dialogues like those of the training, the same every time."""
    dice, tokenizer = random.Random(7), text_model()[1]
    drawn = (tiny_dialogues.draw(dice, Mix()) for _ in range(count))
    return [
        tokenizer.encode(prompt_of(tokenizer, dialogue), add_special_tokens=False)
        for dialogue in drawn
    ]
