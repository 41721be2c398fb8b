"""The frozen vision and audio towers of the tiny omni model, and their features of a collection.

Both towers keep their random weights; only the last layer of each is set, so that features are
centred and as large as embeddings are. Since they never learn, all features are computed once,
before training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from tests.models.tiny_omni_files import AUDIO_MARKER, IMAGE_MARKER, IMAGE_TOKENS
from tests.models.tiny_omni_tasks import COLOURS, SOUNDS, play
from tests.models.tiny_vision_tasks import paint

_PER_COLOUR, _PER_SOUND = 60, 150


@dataclass(frozen=True)
class Collection:
    """Images, then sounds, as features. Row 0 of `features` is zero and stands for plain text.

    texts: what the processor writes for each item. rows: for each item, the rows of `features` that
    replace its first unknown tokens; a sound may have one token more than it has features.
    """

    colours: list[str]
    kinds: list[str]
    texts: list[str]
    rows: list[range]
    features: mx.array


def paintings(rng: random.Random) -> list[tuple[str, Any]]:
    """Pairs of a colour's name and an image; each colour equally often, in many sizes."""
    return [
        (colour, paint(rng, colour, rng.randint(24, 160), rng.randint(24, 160)))
        for colour in COLOURS
        for _ in range(_PER_COLOUR)
    ]


def recordings(rng: random.Random) -> list[tuple[str, np.ndarray]]:
    """Pairs of a kind of sound and its samples, 0.2 to 1.5 seconds; each kind equally often."""
    return [
        (kind, play(rng, kind, rng.uniform(0.2, 1.5))) for kind in SOUNDS for _ in range(_PER_SOUND)
    ]


def _look(model: Any, processor: Any, image: Any) -> mx.array:
    inputs = processor(text=IMAGE_MARKER, images=[image])
    seen: mx.array = model.get_vision_embedding(inputs["pixel_values"], inputs["tgt_sizes"])[0]
    return seen.reshape(-1, seen.shape[-1])


def _listen(model: Any, processor: Any, samples: np.ndarray) -> tuple[mx.array, int]:
    """The features of a sound, and its number of tokens according to the processor."""
    inputs = processor(text=AUDIO_MARKER, audio=[samples])
    features = inputs["audio_features"], inputs["audio_feature_lens"]
    heard: mx.array = model.get_audio_embedding(*features)[0][0]
    start, stop = inputs["audio_bounds"][0][0]
    return heard[: stop - start], int(stop - start)


def settle(model: Any, processor: Any, images: list[Any], sounds: list[np.ndarray]) -> None:
    """Set the last layer of each tower from its outputs for these images and sounds.

    The towers are rounded to bfloat16 as the checkpoint will have them: training then uses the
    features that a server will compute.
    """
    weight = model.language_model.model.embed_tokens.weight
    size = mx.sqrt(mx.mean(mx.square(weight)))
    resampler, ear = model.resampler, model.audio_projection_layer.linear2
    resampler.query = mx.random.normal(resampler.query.shape)
    direct, resampler.proj = resampler.proj, mx.eye(resampler.proj.shape[0])
    seen = mx.concatenate([_look(model, processor, image) for image in images])
    middle = mx.mean(seen, axis=0)
    resampler.ln_post.bias = resampler.ln_post.bias - middle
    resampler.proj = direct * (size / mx.sqrt(mx.mean(mx.square((seen - middle) @ direct))))
    heard = mx.concatenate([_listen(model, processor, samples)[0] for samples in sounds])
    middle = mx.mean(heard, axis=0)
    factor = size / mx.sqrt(mx.mean(mx.square(heard - middle)))
    ear.weight = ear.weight * factor
    ear.bias = (ear.bias - middle) * factor
    for tower in (model.vision_tower, resampler, model.audio_tower, model.audio_projection_layer):
        rounded = tree_map(lambda w: w.astype(mx.bfloat16).astype(mx.float32), tower.parameters())
        tower.update(rounded)


def features_of(
    model: Any, processor: Any, painted: list[tuple[str, Any]], played: list[tuple[str, np.ndarray]]
) -> Collection:
    """Compute the features of every image and sound once."""
    texts: list[str] = []
    rows: list[range] = []
    features = [mx.zeros((1, model.config.text_config.hidden_size))]
    used = 1

    def add(text: str, perceived: mx.array) -> None:
        nonlocal used
        mx.eval(perceived)
        texts.append(text)
        rows.append(range(used, used + len(perceived)))
        features.append(perceived)
        used += len(perceived)

    for _, image in painted:
        add(f"<image>{'<unk>' * IMAGE_TOKENS}</image>", _look(model, processor, image))
    for _, samples in played:
        heard, tokens = _listen(model, processor, samples)
        add(f"<|audio_start|>{'<unk>' * tokens}<|audio_end|>", heard)
    table = mx.concatenate(features)
    mx.eval(table)
    colours, kinds = [colour for colour, _ in painted], [kind for kind, _ in played]
    return Collection(colours, kinds, texts, rows, table)
