"""The committed checkpoint has the abilities that other tests rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import batch_generate

from tests.models.tiny_batches import prompt_of
from tests.models.tiny_dialogue import Dialogue, ask
from tests.models.tiny_tokenizer import TEMPLATE, check_round_trip

DIRECTORY = Path(__file__).parent / "tiny_text"


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(str(DIRECTORY))[:2]
    model.set_dtype(mx.float32)
    return model, tokenizer


def test_the_checkpoint_has_the_trainers_template() -> None:
    assert (DIRECTORY / "chat_template.jinja").read_text() == TEMPLATE.read_text()


def test_the_tokenizer_loses_nothing() -> None:
    check_round_trip(DIRECTORY)


def test_mlx_lm_sees_thinking_and_json_tools(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    assert tokenizer.has_thinking
    assert tokenizer.has_tool_calling
    assert tokenizer.tool_parser.__module__.endswith("json_tools")


DIALOGUES = [
    ask("capital", "What is the capital of France?", "The capital of France is Paris."),
    ask("count", "Count to 12.", "1 2 3 4 5 6 7 8 9 10 11 12"),
    ask(
        "sum",
        "What is 3 + 4?",
        "3 + 4 = 7",
        "I have to find 3 plus 4. 3 + 4 = 7.",
    ),
]


def test_it_answers(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    prompts = [
        tokenizer.encode(prompt_of(tokenizer, d), add_special_tokens=False) for d in DIALOGUES
    ]
    written = batch_generate(model, tokenizer, prompts, max_tokens=80).texts
    assert written == [dialogue.answer for dialogue in DIALOGUES]


def test_a_dialogue_shows_its_reasoning() -> None:
    thought: Dialogue = DIALOGUES[2]
    assert thought.answer.startswith("<think>\nI have to find 3 plus 4.")
