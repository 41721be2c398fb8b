"""Trains EAGLE-3 and DFlash drafters, and writes them as the hub has them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.losses import cross_entropy
from mlx.nn.utils import value_and_grad
from mlx.optimizers import Adam
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from backend.engine.caching import kv
from backend.engine.cpu_kernels import functions_of_mlx
from backend.engine.drafting.heads import (
    Choices,
    block_layers,
    eagle_layers,
    hidden_size,
    open_block_head,
    open_eagle,
)
from backend.engine.drafting.hidden_states import LayerStates
from backend.engine.sampling.logits_head import LogitsHead
from tests.engine.drafting.heads import Both
from tests.engine.loading_models import write_weights

Texts = Callable[[random.Random], list[list[int]]]  # of equal lengths

FIRST = 1  # the lowest token id in EAGLE-3's reduced vocabulary
_PARTS = 3  # number of parts of each text on which DFlash is trained


def write_drafter(
    folder: Path,
    model: Any,
    config: Mapping[str, Any],
    texts: Texts,
    steps: int,
    rate: float = 1e-2,
) -> None:
    """Train a drafter for the model, together with it unless it is frozen, and write it."""
    vocabulary = kv.vocabulary_size(model)
    size, layers = hidden_size(model, vocabulary), len(model.layers)
    projection = LogitsHead(model, vocabulary)
    weights = _random_weights(config)
    if "dflash_config" in config:
        head: Any = open_block_head(config, weights, model, size, vocabulary)
        choices = Choices(projection.project, vocabulary)
        positions = block_layers(config)
    else:
        head, choices = open_eagle(config, weights, model, size, vocabulary, projection)
        positions = eagle_layers(config, layers)
    states = LayerStates(model, positions, size)
    both: Any = Both(model, head)
    optimizer = Adam(rate)
    dice = random.Random(1)

    def loss(both: Both, batch: list[list[int]]) -> mx.array:
        tokens = mx.array(batch)
        with states.watched() as seen:
            logits = both.model(tokens[:, :-1], cache=make_prompt_cache(both.model))
        own = cross_entropy(logits, tokens[:, 1:], reduction="mean")
        ahead = _filled if "dflash_config" in config else _predicted
        return own + ahead(both.head, choices, batch, seen[0], dice)

    step = value_and_grad(both, loss)
    for _ in range(steps):
        with functions_of_mlx():
            _, gradients = step(both, texts(dice))
        optimizer.update(both, gradients)
        mx.eval(both.parameters(), optimizer.state)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    found: Any = tree_flatten(head.parameters())
    own: dict[str, mx.array] = {name.removeprefix("inner."): value for name, value in found}
    write_weights(folder, _as_published(weights | own, config, vocabulary))


def _random_weights(config: Mapping[str, Any]) -> dict[str, mx.array]:
    from mlx_vlm.speculative.drafters import eagle3, qwen3_dflash

    mx.random.seed(3)
    if "dflash_config" in config:
        kind = qwen3_dflash.ModelConfig.from_dict(dict(config))
        return dict(tree_flatten(qwen3_dflash.DFlashDraftModel(kind).parameters()))
    size = config["draft_vocab_size"]
    layer = dict(config.get("transformer_layer_config", config))
    shape = {"draft_vocab_size": size, "transformer_layer_config": layer}
    drafter = eagle3.Eagle3DraftModel(eagle3.ModelConfig.from_dict(shape))
    weights = dict(tree_flatten(drafter.parameters()))
    return weights | {"d2t": mx.full(size, FIRST, mx.int64)}


def _as_published(
    weights: dict[str, mx.array], config: Mapping[str, Any], vocabulary: int
) -> dict[str, mx.array]:
    if "dflash_config" in config:
        return weights
    known = mx.arange(vocabulary)
    weights["t2d"] = (known >= FIRST) & (known < FIRST + config["draft_vocab_size"])
    weights["d2t"] = weights["d2t"].astype(mx.int64)
    if "transformer_layer_config" in config:
        return weights
    return {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}


def _predicted(
    head: Any, choices: Choices, texts: list[list[int]], states: mx.array, _: random.Random
) -> mx.array:
    """The loss of EAGLE-3's guesses, from the model's states and from its own."""
    tokens = mx.array(texts)
    found = mx.array(0.0)
    for ahead in (2, 3):
        fed = tokens[:, ahead - 1 : -1]
        states = head(fed, states[:, : fed.shape[1]], cache=make_prompt_cache(head))
        wanted = tokens[:, ahead:] - FIRST
        known = (wanted >= 0) & (wanted < choices.vocabulary)
        every = cross_entropy(choices.project(states), mx.where(known, wanted, 0))
        found = found + (every * known).mean()
    return found


def _filled(
    head: Any, choices: Choices, texts: list[list[int]], states: mx.array, dice: random.Random
) -> mx.array:
    """The loss of DFlash's guesses after some parts of the texts."""
    found = mx.array(0.0)
    size = head.longest
    for _ in range(_PARTS):
        count = dice.randrange(1, len(texts[0]) - size - 1)
        cache = make_prompt_cache(head)
        head.append(states[:, :count], cache)
        filled = head.fill([one[count] for one in texts], size, cache)
        wanted = mx.array([one[count + 1 : count + 1 + size] for one in texts])
        found = found + cross_entropy(choices.project(filled), wanted, reduction="mean")
    return found
