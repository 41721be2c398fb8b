"""Small random models with a head for multi-token prediction that was trained on their answers."""

from __future__ import annotations

import importlib
import random
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.nn.layers.base import Module
from mlx.nn.losses import cross_entropy
from mlx.nn.utils import value_and_grad
from mlx.optimizers import Adam
from mlx.utils import tree_flatten

from backend.engine.caching import kv
from backend.engine.drafting.prediction_head import PredictionHead, open_head
from backend.engine.loading.checkpoint import Checkpoint, inspect
from backend.engine.sampling.logits_head import LogitsHead
from backend.engine.settings import Settings
from tests.engine.loading_models import write_model, write_weights

VOCABULARY = 96
_TEXTS, _LENGTH, _STEPS = 32, 8, 50
_SIZE = 32
_SHARED: dict[str, Any] = {
    "hidden_size": _SIZE,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": _SHARED
    | {
        "model_type": "qwen3_5",
        "num_hidden_layers": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "glm4_moe": _SHARED
    | {
        "model_type": "glm4_moe",
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": False,
    },
}
# How checkpoints name what `PredictionHead` has.
_NAMES = {
    "qwen3_5": {
        "projection": "mtp.fc",
        "of_token": "mtp.pre_fc_norm_embedding",
        "of_state": "mtp.pre_fc_norm_hidden",
        "inner": "mtp",
    },
    "glm4_moe": {
        "projection": "model.layers.2.eh_proj",
        "of_token": "model.layers.2.enorm",
        "of_state": "model.layers.2.hnorm",
        "inner.norm": "model.layers.2.shared_head.norm",
        "inner.layers.0": "model.layers.2",
    },
}


def write_checkpoint(directory: Path, kind: str, steps: int = _STEPS) -> Checkpoint:
    """A model and its head, trained together to go on as `follower` says, in float32."""
    write_model(directory, dtype="float32", **CONFIGS[kind])
    model = mlx_lm.load(str(directory))[0]
    config = CONFIGS[kind] | {"num_hidden_layers": 1, "full_attention_interval": 1}
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    body = module.Model(module.ModelArgs.from_dict(config | {"first_k_dense_replace": 0}))
    head = PredictionHead(body, model.model.embed_tokens, _SIZE, 1e-5)
    _train(model, head, steps)
    weights = dict(tree_flatten(model.parameters()))
    write_weights(directory, weights | published(head, kind))
    return inspect(directory, directory.name, Settings())


def follower(token: int) -> int:
    """The token that follows, in the one text that the models know: a cycle of all but 0."""
    return token * 5 % (VOCABULARY + 1) if token * 5 % (VOCABULARY + 1) < VOCABULARY else 1


class _Both(Module):
    def __init__(self, model: Any, head: PredictionHead) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.head = model, head


def _train(model: Any, head: PredictionHead, steps: int) -> None:
    projection = LogitsHead(model, VOCABULARY)
    both: Any = _Both(model, head)
    optimizer = Adam(1e-2)

    def loss(both: _Both, tokens: mx.array) -> mx.array:
        with projection.watched() as seen:
            logits = both.model(tokens[:, :-1], cache=kv.new_row(both.model))
        ahead = both.head(tokens[:, 1:-1], seen[0][:, :-1], cache=both.head.make_cache())
        own = cross_entropy(logits, tokens[:, 1:], reduction="mean")
        return own + cross_entropy(projection.project(ahead), tokens[:, 2:], reduction="mean")

    step = value_and_grad(both, loss)
    dice = random.Random(1)
    for _ in range(steps):
        _, gradients = step(both, mx.array([text(dice, _LENGTH) for _ in range(_TEXTS)]))
        optimizer.update(both, gradients)
        mx.eval(both.parameters(), optimizer.state)


def text(dice: random.Random, length: int) -> list[int]:
    found = [dice.randrange(1, VOCABULARY)]
    while len(found) < length:
        found.append(follower(found[-1]))
    return found


def published(head: Any, kind: str) -> dict[str, mx.array]:
    """The head's weights under the names of a checkpoint."""
    found: dict[str, mx.array] = {}
    own_weights: Any = tree_flatten(head.parameters())
    for name, value in own_weights:
        own = next(own for own in _NAMES[kind] if name.startswith(f"{own}."))
        found[_NAMES[kind][own] + name[len(own) :]] = value
    return found


opened = partial(open_head, vocabulary=VOCABULARY)
