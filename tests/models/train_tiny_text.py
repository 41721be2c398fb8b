"""Makes the tiny text model of the tests: tokenizer, dialogues, training, checkpoint.

`python -m tests.models.train_tiny_text --out DIR` takes up to 45 minutes on one core with OpenBLAS
preloaded (see README.md beside this file), so the weights are committed and continuous integration
never runs this.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.qwen3 import Model, ModelArgs
from transformers import AutoTokenizer

from tests.models import tiny_dialogues, tiny_math
from tests.models import tiny_words as words
from tests.models.tiny_batches import batches
from tests.models.tiny_dialogue import Words
from tests.models.tiny_dialogues import SECOND_SHARES, Mix
from tests.models.tiny_tokenizer import (
    MAX_POSITIONS,
    VOCABULARY_SIZE,
    check_round_trip,
    save_tokenizer,
    train_tokenizer,
)

TOKENS_PER_STEP = 2560
WARM_UP = 50
SEED = 7


@dataclass(frozen=True)
class Lesson:
    """A phase of training with its own learning rate schedule."""

    steps: int
    matrix_rate: float
    vector_rate: float
    easy_steps: int
    easy: Mix
    hard: Mix


_WIDER_WORDS = Words(
    city=partial(words.city, make=words.any_made_up_word),
    name=partial(words.name, make=words.any_made_up_word),
)
LESSONS = (
    Lesson(
        steps=3200,
        matrix_rate=0.007,
        vector_rate=4e-3,
        easy_steps=1760,
        easy=Mix(words=Words(clutter=0.15)),
        hard=Mix(longest_filler=240),
    ),
    Lesson(
        steps=2600,
        matrix_rate=0.006,
        vector_rate=2e-3,
        easy_steps=1200,
        easy=Mix(SECOND_SHARES, replace(_WIDER_WORDS, clutter=0.3), 120, 0.15),
        hard=Mix(SECOND_SHARES, _WIDER_WORDS, 240, 0.25),
    ),
)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": True,
    "vocab_size": VOCABULARY_SIZE,
    "torch_dtype": "bfloat16",
}


def make_tokenizer(directory: Path) -> Any:
    """Learn a tokenizer from rendered dialogues and load it back as a server would."""
    rng = random.Random(SEED)
    texts: list[str] = []
    for _ in range(8000):
        dialogue = tiny_dialogues.draw(rng, Mix(words=Words(clutter=0.3), longest_filler=40))
        texts.extend([str(m["content"]) for m in dialogue.messages] + [dialogue.answer])
        texts.extend(json.dumps(tool) for tool in dialogue.tools)
    texts.extend(["To use a tool, write", "Tools, one to a line:", "user", "assistant"] * 1500)
    save_tokenizer(train_tokenizer(texts), directory)
    check_round_trip(directory)
    return AutoTokenizer.from_pretrained(directory)


def save_model(model: Model, tokenizer: Any, directory: Path) -> None:
    """Write weights in bfloat16 and the two configs."""
    ends = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    generation = {**ends, "do_sample": False, "temperature": 0.0}
    for name, content in (("config", CONFIG | ends), ("generation_config", generation)):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    weights = dict(tree_flatten(tree_map(lambda w: w.astype(mx.bfloat16), model.parameters())))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})


def load_weights(model: Model, directory: Path) -> None:
    """Load the rounded weights, so that a lesson starts the same in a fresh process."""
    model.load_weights(str(directory / "model.safetensors"))
    model.set_dtype(mx.float32)


def _schedule(peak: float, steps: int) -> Any:
    """A short warm-up, a plateau, and a linear decay to zero."""

    def rate(step: mx.array) -> mx.array:
        left = mx.minimum(1.0, (steps - step) / (0.6 * steps))
        return peak * mx.minimum(left, (step + 1) / WARM_UP)

    return rate


def _is_inner_matrix(name: str, weight: mx.array) -> bool:
    return weight.ndim == 2 and "embed_tokens" not in name


def train(model: Model, tokenizer: Any, lesson: Lesson, seed: int) -> None:
    """Muon for the inner matrices, AdamW for embedding and norms."""
    optimizer = optim.MultiOptimizer(
        [
            optim.Muon(_schedule(lesson.matrix_rate, lesson.steps), weight_decay=0.0),
            optim.AdamW(
                _schedule(lesson.vector_rate, lesson.steps), betas=[0.9, 0.98], weight_decay=0.01
            ),
        ],
        [_is_inner_matrix],
    )
    loss_and_gradient = value_and_grad(model, tiny_math.loss)
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def advance(*batch: mx.array) -> mx.array:
        value: mx.array
        value, gradient = loss_and_gradient(model, *batch)
        optimizer.update(model, gradient)
        return value

    rng = random.Random(seed)
    started, step, seen, smooth = time.monotonic(), 0, 0, math.nan
    while step < lesson.steps:
        mix = lesson.easy if step < lesson.easy_steps else lesson.hard
        for batch in batches(tokenizer, rng, TOKENS_PER_STEP, mix):
            value = advance(
                mx.array(batch.tokens),
                mx.array(batch.positions),
                mx.array(batch.targets),
                mx.array(batch.weights),
            )
            mx.eval(value, state)
            loss = float(value)
            smooth = loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss
            step, seen = step + 1, seen + batch.tokens.size
            if step % 50 == 0 or step == lesson.steps:
                passed = time.monotonic() - started
                print(f"step {step} loss {smooth:.4f} {seen} tokens {passed:.0f} s", flush=True)
            if step == lesson.steps:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the checkpoint goes")
    parser.add_argument(
        "--first-lesson", type=int, default=1, help="2 goes on from the checkpoint in --out"
    )
    arguments = parser.parse_args()
    directory: Path = arguments.out
    directory.mkdir(parents=True, exist_ok=True)
    mx.random.seed(SEED)
    model = Model(ModelArgs.from_dict(CONFIG))
    if arguments.first_lesson == 1:
        tokenizer = make_tokenizer(directory)
        mx.eval(model.parameters())
    else:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    for number, lesson in enumerate(LESSONS, start=1):
        if number < arguments.first_lesson:
            continue
        if number > 1:
            load_weights(model, directory)
        print(f"lesson {number}: {lesson.steps} steps", flush=True)
        train(model, tokenizer, lesson, SEED + number)
        save_model(model, tokenizer, directory)


if __name__ == "__main__":
    main()
