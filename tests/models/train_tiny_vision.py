"""Makes the tiny vision model that tests show pictures to: `tiny_text/` with a frozen eye.

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.qwen3 import Model as TextModel
from mlx_lm.models.qwen3 import ModelArgs as TextArgs
from mlx_vlm.models.qwen3_vl.config import ModelConfig
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from mlx_vlm.models.qwen3_vl.qwen3_vl import Model
from tokenizers import Tokenizer

from tests.models import tiny_math
from tests.models.tiny_batches import PROMPT_WEIGHT, STOP_SHARE, prompt_of
from tests.models.tiny_dialogue import Words
from tests.models.tiny_dialogues import SECOND_SHARES, Mix
from tests.models.tiny_tokenizer import TEMPLATE, TURN_END
from tests.models.tiny_vision_gallery import Gallery, hang, paintings, settle
from tests.models.tiny_vision_tasks import Seen, colour_dialogue, text_dialogue

TEXT = Path(__file__).parent / "tiny_text"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SEED = 23
_TOKENS_PER_STEP = 2048
_LONGEST = 512
_POOL = 512
_TEXT_SHARE = 0.25
_MATRIX_RATE, _VECTOR_RATE, _WARM_UP = 0.004, 2e-3, 50
_SECTIONS = [6, 5, 5]
_MIX = Mix(SECOND_SHARES, Words(clutter=0.4), longest_filler=40, padded_share=0.1)

_PARTS = """{%- for part in content if part.type == 'text' -%}
            {{- part.text -}}
        {%- endfor -%}"""
_PARTS_WITH_MEDIA = """{%- for part in content -%}
            {%- if part.type == 'text' -%}
                {{- part.text -}}
            {%- elif part.type in ('image', 'image_url') -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type in ('video', 'video_url') -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- endif -%}
        {%- endfor -%}"""


def template() -> str:
    """The chat template of the text model, with a place for each picture."""
    text = TEMPLATE.read_text()
    if _PARTS not in text:
        raise ValueError("the text model's template writes the parts of a message otherwise")
    return text.replace(_PARTS, _PARTS_WITH_MEDIA)


def config() -> dict[str, Any]:
    """Qwen3-VL around the text model's sizes."""
    text = json.loads((TEXT / "config.json").read_text())
    ends = {name: text[name] for name in ("eos_token_id", "pad_token_id")}
    first: int = text["vocab_size"]
    size = first + len(VISION_TOKENS)
    drop = {"architectures", "torch_dtype", "bos_token_id"}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {name: value for name, value in text.items() if name not in drop}
        | {
            "model_type": "qwen3_vl_text",
            "vocab_size": size,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": _SECTIONS,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": text["hidden_size"],
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        "vision_start_token_id": first,
        "vision_end_token_id": first + 1,
        "image_token_id": first + 2,
        "video_token_id": first + 3,
        "vocab_size": size,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **ends,
    }


def write_processor(directory: Path) -> None:
    """Everything but the weights: tokenizer, template, configs."""
    tokenizer = Tokenizer.from_file(str(TEXT / "tokenizer.json"))
    tokenizer.add_special_tokens(list(VISION_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = json.loads((TEXT / "tokenizer_config.json").read_text())
    tokenizer_config["extra_special_tokens"] += VISION_TOKENS
    image: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64},
    }
    video = image | {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "fps": 2,
        "min_frames": 2,
        "max_frames": 16,
        "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 8 * 64 * 64},
    }
    contents = {
        "tokenizer_config": tokenizer_config,
        "config": config(),
        "generation_config": json.loads((TEXT / "generation_config.json").read_text()),
        "preprocessor_config": image,
        "video_preprocessor_config": video,
    }
    for name, content in contents.items():
        (directory / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (directory / "chat_template.jinja").write_text(template())


def text_part() -> TextModel:
    """The text model with random embeddings for the tokens of vision."""
    args = json.loads((TEXT / "config.json").read_text())
    model = TextModel(TextArgs.from_dict(args | {"vocab_size": config()["vocab_size"]}))
    weights: dict[str, mx.array] = mx.load(str(TEXT / "model.safetensors"))  # type: ignore[assignment]
    known = weights["model.embed_tokens.weight"].astype(mx.float32)
    fresh = mx.random.normal((len(VISION_TOKENS), known.shape[1])) * mx.std(known)
    weights["model.embed_tokens.weight"] = mx.concatenate([known, fresh])
    model.load_weights(list(weights.items()))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


@dataclass(frozen=True)
class Example:
    """One dialogue. `places[i]` is the row of the gallery behind token i, 0 for text;
    `positions` has the shape (3, tokens): time, row, column."""

    tokens: list[int]
    answer_from: int
    places: list[int]
    positions: np.ndarray


def _positions(places: list[tuple[int, int] | None]) -> np.ndarray:
    """The positions of Qwen3-VL: a picture's cells count rows and columns from where it begins,
    and what follows goes on behind the largest of them. `None` stands for a token of text."""
    columns: list[tuple[int, int, int]] = []
    following = 0
    for place in places:
        if place is None:
            columns.append((following,) * 3)
            following += 1
            continue
        rows, width = place
        columns += [
            (following, following + row, following + column)
            for row in range(rows)
            for column in range(width)
        ]
        following += max(rows, width)
    return np.array(columns, np.int32).T


def encode(tokenizer: Any, gallery: Gallery, seen: Seen) -> Example:
    """Tokens, with each picture's one placeholder widened to the cells of its grid."""
    prompt = tokenizer.encode(prompt_of(tokenizer, seen.dialogue), add_special_tokens=False)
    end = "" if seen.dialogue.endless else TURN_END
    answer = tokenizer.encode(seen.dialogue.answer + end, add_special_tokens=False)
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    left = iter(seen.pictures)
    tokens: list[int] = []
    places: list[int] = []
    shapes: list[tuple[int, int] | None] = []
    for token in prompt:
        if token == pad:
            picture = next(left)
            size = gallery.size(picture)
            tokens += [pad] * size
            places += range(gallery.starts[picture], gallery.starts[picture] + size)
            shapes.append(gallery.grids[picture])
        else:
            tokens.append(token)
            places.append(0)
            shapes.append(None)
    if next(left, None) is not None:
        raise ValueError("a picture of the dialogue has no place in its prompt")
    begin = len(tokens)
    positions = _positions(shapes + [None] * len(answer))
    return Example(tokens + answer, begin, places + [0] * len(answer), positions)


def _collate(examples: list[Example], stop_tokens: list[int]) -> list[mx.array]:
    longest = max(len(example.tokens) for example in examples) - 1
    length = -(-longest // 32) * 32
    shape = (len(examples), length)
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    places, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    positions = np.zeros((3, *shape), np.int32)
    for row, example in enumerate(examples):
        used, start = len(example.tokens) - 1, example.answer_from - 1
        tokens[row, :used] = example.tokens[:-1]
        targets[row, :used] = example.tokens[1:]
        places[row, :used] = example.places[:-1]
        positions[:, row, :used] = example.positions[:, :-1]
        weights[row, :start] = PROMPT_WEIGHT
        weights[row, :start][np.array(example.places[1 : start + 1], bool)] = 0
        weights[row, start:used] = 1
        stops = start + np.flatnonzero(np.isin(targets[row, start:used], stop_tokens))
        weights[row, stops] += (used - start) * STOP_SHARE
    return [mx.array(part) for part in (tokens, places, positions, targets, weights)]


def batches(tokenizer: Any, gallery: Gallery, rng: random.Random) -> Iterator[list[mx.array]]:
    """Batches of one pool of fresh dialogues, alike in length."""
    stop_tokens = tokenizer.convert_tokens_to_ids([TURN_END, "</think>"])
    pool: list[Example] = []
    while len(pool) < _POOL:
        if rng.random() < _TEXT_SHARE:
            seen = text_dialogue(rng, _MIX, len(gallery.colours))
        else:
            seen = colour_dialogue(rng, gallery.colours)
        example = encode(tokenizer, gallery, seen)
        if len(example.tokens) <= _LONGEST:
            pool.append(example)
    pool.sort(key=lambda example: len(example.tokens))
    groups: list[list[Example]] = [[]]
    for example in pool:
        if (len(groups[-1]) + 1) * len(example.tokens) > _TOKENS_PER_STEP:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    for group in groups:
        yield _collate(group, stop_tokens)


def _angles(positions: mx.array, dims: int, base: float) -> mx.array:
    """Interleaved multimodal rotary embedding: frequency i turns with time, row or column."""
    frequencies = base ** (-mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    axis = [0] * (dims // 2)
    for number in (1, 2):
        for place in range(number, min(_SECTIONS[number] * 3, dims // 2), 3):
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
    model: TextModel, tokenizer: Any, gallery: Gallery, steps: int, keep: Callable[[], None]
) -> None:
    """Muon for the inner matrices, AdamW for embedding and norms, as for the text model.

    `keep` is called now and then, and at the end.
    """

    def loss(model: Any, tokens: Any, places: Any, positions: Any, *goal: mx.array) -> mx.array:
        logits = logits_of(model, gallery.features, gallery.deep, tokens, places, positions)
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
        for batch in batches(tokenizer, gallery, rng):
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
    """One file in bfloat16: the trained text part under `language_model`, and the frozen eye."""
    model.language_model.load_weights(list(tree_flatten(text.parameters())))
    weights = dict(tree_flatten(tree_map(lambda w: w.astype(mx.bfloat16), model.parameters())))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    arguments = parser.parse_args()
    directory: Path = arguments.out
    directory.mkdir(parents=True, exist_ok=True)
    mx.random.seed(SEED)
    write_processor(directory)
    model = Model(ModelConfig.from_dict(config()))
    text = text_part()
    processor = Qwen3VLProcessor.from_pretrained(directory)
    painted = paintings(random.Random(SEED))
    if arguments.resume:
        model.load_weights(str(directory / "model.safetensors"))
        model.set_dtype(mx.float32)
        text.load_weights(list(tree_flatten(model.language_model.parameters())))
    else:
        model.language_model.load_weights(list(tree_flatten(text.parameters())))
        settle(model, processor, [image for _, image in painted[::8]])
    train(
        text,
        processor.tokenizer,
        hang(model, processor, painted),
        arguments.steps,
        lambda: save(model, text, directory),
    )


if __name__ == "__main__":
    main()
