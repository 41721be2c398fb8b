"""Makes the tiny vision model of the tests: `tiny_text/` with a frozen vision tower.

`python -m tests.models.train_tiny_vision --out DIR` takes about fifteen minutes on one core with
OpenBLAS preloaded, which is why the weights are committed. The language part begins with the
weights of `tiny_text/`, so that the model still answers questions without a picture.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.qwen3 import Model as TextModel
from mlx_lm.models.qwen3 import ModelArgs as TextArgs
from mlx_vlm.models.qwen3_vl.config import ModelConfig
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from mlx_vlm.models.qwen3_vl.qwen3_vl import Model

from tests.models import tiny_math
from tests.models.tiny_vision_batches import batches
from tests.models.tiny_vision_files import (
    SECTIONS,
    TEXT,
    config,
    write_processor,
)
from tests.models.tiny_vision_gallery import features_of, paintings, settle

SEED = 23
_MATRIX_RATE, _VECTOR_RATE, _WARM_UP = 0.004, 2e-3, 50


def text_part(vocabulary: int) -> TextModel:
    """The text model, with random embeddings for the tokens that its vocabulary lacks."""
    args = json.loads((TEXT / "config.json").read_text())
    model = TextModel(TextArgs.from_dict(args | {"vocab_size": vocabulary}))
    weights: dict[str, mx.array] = mx.load(str(TEXT / "model.safetensors"))  # type: ignore[assignment]
    known = weights["model.embed_tokens.weight"].astype(mx.float32)
    fresh = mx.random.normal((vocabulary - known.shape[0], known.shape[1])) * mx.std(known)
    weights["model.embed_tokens.weight"] = mx.concatenate([known, fresh])
    model.load_weights(list(weights.items()))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def _angles(positions: mx.array, dims: int, base: float) -> mx.array:
    """Interleaved multimodal rotary embedding: frequency i turns with time, row or column."""
    frequencies = base ** (-mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    axis = [0] * (dims // 2)
    for number in (1, 2):
        for place in range(number, min(SECTIONS[number] * 3, dims // 2), 3):
            axis[place] = number
    chosen = positions[mx.array(axis)].transpose(1, 2, 0).astype(mx.float32)
    return (chosen * frequencies)[:, None]


def logits_of(
    model: Any,
    features: mx.array,
    deep: mx.array,
    tokens: mx.array,
    places: mx.array,
    positions: mx.array,
) -> mx.array:
    """What mlx-vlm's qwen3_vl computes, from the text part and the features of the gallery."""
    angles = _angles(positions, model.args.head_dim, model.args.rope_theta)
    words = model.model.embed_tokens(tokens) * (places == 0)[..., None]
    x = words + features[places]
    return tiny_math.logits_from(model, x, tiny_math.rotation_of(angles), deep[places])


def _rate(peak: float, steps: int) -> Any:
    def rate(step: mx.array) -> mx.array:
        left = mx.minimum(1.0, (steps - step) / (0.7 * steps))
        return peak * mx.minimum(left, (step + 1) / _WARM_UP)

    return rate


def train(
    model: TextModel,
    features: mx.array,
    deep: mx.array,
    draw: Callable[[random.Random], Iterator[list[mx.array]]],
    steps: int,
    keep: Callable[[], None],
) -> None:
    """Muon for the inner matrices, AdamW for embedding and norms, as for the text model.

    features, deep: as a gallery has them. draw: the batches of a pool. `keep` is called now and
    then, and at the end.
    """

    def loss(model: Any, tokens: Any, places: Any, positions: Any, *goal: mx.array) -> mx.array:
        logits = logits_of(model, features, deep, tokens, places, positions)
        return tiny_math.mean_loss(logits, *goal)

    optimizer = optim.MultiOptimizer(
        [
            optim.Muon(_rate(_MATRIX_RATE, steps), weight_decay=0.0),
            optim.AdamW(_rate(_VECTOR_RATE, steps), betas=[0.9, 0.98], weight_decay=0.01),
        ],
        [lambda name, weight: weight.ndim == 2 and "embed_tokens" not in name],
    )
    loss_and_gradient = value_and_grad(model, loss)
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def advance(*batch: mx.array) -> mx.array:
        value: mx.array
        value, gradient = loss_and_gradient(model, *batch)
        optimizer.update(model, gradient)
        return value

    rng = random.Random(f"{SEED} {steps}")
    started, step, smooth = time.monotonic(), 0, None
    while step < steps:
        for batch in draw(rng):
            value = advance(*batch)
            mx.eval(value, state)
            smooth = float(value) if smooth is None else 0.98 * smooth + 0.02 * float(value)
            step += 1
            if step % 50 == 0 or step == steps:
                passed = time.monotonic() - started
                print(f"step {step} loss {smooth:.4f} {passed:.0f} s", flush=True)
            if step % 100 == 0 or step == steps:
                keep()
            if step == steps:
                break


def save(model: Model, text: TextModel, directory: Path) -> None:
    """One file in bfloat16: the trained text part under `language_model`, and the frozen tower."""
    model.language_model.load_weights(list(tree_flatten(text.parameters())))
    weights = dict(tree_flatten(tree_map(lambda w: w.astype(mx.bfloat16), model.parameters())))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})


def arguments_of(description: str | None, steps: int) -> argparse.Namespace:
    """What a lesson is given: `out` (a folder, made here), `steps` and `resume`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def resume(model: Any, text: TextModel, directory: Path) -> None:
    """Load the whole model and its text part from the checkpoint, in float32."""
    model.load_weights(str(directory / "model.safetensors"))
    model.set_dtype(mx.float32)
    text.load_weights(list(tree_flatten(model.language_model.parameters())))


def main() -> None:
    arguments = arguments_of(__doc__, steps=600)
    directory = arguments.out
    mx.random.seed(SEED)
    write_processor(directory)
    model = Model(ModelConfig.from_dict(config()))
    text = text_part(config()["vocab_size"])
    processor = Qwen3VLProcessor.from_pretrained(directory)
    painted = paintings(random.Random(SEED))
    if arguments.resume:
        resume(model, text, directory)
    else:
        model.language_model.load_weights(list(tree_flatten(text.parameters())))
        settle(model, processor, [image for _, image in painted[::8]])
    gallery = features_of(model, processor, painted)
    train(
        text,
        gallery.features,
        gallery.deep,
        partial(batches, processor.tokenizer, gallery),
        arguments.steps,
        lambda: save(model, text, directory),
    )


if __name__ == "__main__":
    main()
