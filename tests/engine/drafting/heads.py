"""Small random models with a head for multi-token prediction that was trained on their answers."""

from __future__ import annotations

import importlib
import random
import shutil
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
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter

from backend.engine.cpu_kernels import functions_of_mlx
from backend.engine.drafting.heads import embedding_of
from backend.engine.drafting.prediction_head import PredictionHead, open_head
from backend.engine.loading.checkpoint import Checkpoint, inspect
from backend.engine.loading.recurrent_layers import use_chunks
from backend.engine.sampling.logits_head import LogitsHead
from backend.engine.settings import Settings
from common.drafter_kind import SPLIT_HEADS
from tests.engine.loading_models import read_weights, write_model, write_weights

VOCABULARY = 96
LENGTH = 20  # tokens of a text; attention learns no position beyond
_TEXTS, _STEPS = 16, 60
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
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "mtp_num_hidden_layers": 1,
}
_ROTATED: dict[str, Any] = {
    "rope_parameters": {
        "type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
_SELECTED: dict[str, Any] = {
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 512,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "rope_parameters": {"rope_theta": 10000.0},
}
_MAMBA: dict[str, Any] = {
    "hybrid_override_pattern": ["M", "*"],
    "mtp_hybrid_override_pattern": ["*", "E"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_proj_bias": False,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 2,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "moe_shared_expert_intermediate_size": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    kind: _SHARED | {"model_type": kind, "num_hidden_layers": 2} | own
    for kind, own in {
        "qwen3_5": _DELTA | _ROTATED,
        "qwen3_5_moe": _DELTA | _ROTATED | _EXPERTS,
        "qwen3_next": _DELTA
        | _EXPERTS
        # Its own first layer has no experts; the head's has some.
        | {"decoder_sparse_step": 2, "mlp_only_layers": [0]}
        | {"partial_rotary_factor": 0.5, "rope_theta": 10000.0},
        "glm4_moe": _ROUTED | {"partial_rotary_factor": 0.5, "use_qk_norm": True},
        "glm4_moe_lite": _ROUTED | _LATENT,
        "deepseek_v3": _ROUTED | _LATENT,
        "glm_moe_dsa": _ROUTED | _LATENT | _SELECTED,
        "nemotron_h": _ROUTED | _MAMBA,
        "mimo": {"num_nextn_predict_layers": 1},
    }.items()
}
# Changes to the configuration for a model that consists of a head's layer only.
_ALONE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "full_attention_interval": 1,
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hybrid_override_pattern": ["*", "E"],
}
STATE_FIRST = ("mimo",)  # heads whose input is (state, token) instead of (token, state)
_QWEN = {
    "projection": "mtp.fc",
    "of_token": "mtp.pre_fc_norm_embedding",
    "of_state": "mtp.pre_fc_norm_hidden",
    "inner": "mtp",
}
_NEXT_LAYER = {
    "projection": "model.layers.2.eh_proj",
    "of_token": "model.layers.2.enorm",
    "of_state": "model.layers.2.hnorm",
    "inner.norm": "model.layers.2.shared_head.norm",
    "inner.layers.0": "model.layers.2",
}
_MIMO = {
    "projection": "model.mtp_layers.0.input_proj",
    "of_token": "model.mtp_layers.0.token_layernorm",
    "of_state": "model.mtp_layers.0.hidden_layernorm",
    "inner.norm": "model.mtp_layers.0.final_layernorm",
    "inner.layers.0": "model.mtp_layers.0",
}
_NEMOTRON = {
    "projection": "mtp.layers.0.eh_proj",
    "of_token": "mtp.layers.0.enorm",
    "of_state": "mtp.layers.0.hnorm",
    "inner.norm_f": "mtp.layers.1.final_layernorm",
    "inner": "mtp",
}
# How checkpoints name what `PredictionHead` has.
_NAMES = {
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": _QWEN,
    "glm4_moe": _NEXT_LAYER,
    "glm4_moe_lite": _NEXT_LAYER,
    "deepseek_v3": _NEXT_LAYER,
    "glm_moe_dsa": _NEXT_LAYER,
    "nemotron_h": _NEMOTRON,
    "mimo": _MIMO,
}
# The families whose heads mlx-vlm splits from their models, and this backend reads.
SPLIT = sorted({kind for kinds in SPLIT_HEADS.values() for kind in kinds})


def write_checkpoint(
    directory: Path, kind: str, steps: int = _STEPS, length: int = LENGTH, **changes: Any
) -> Checkpoint:
    """A model and its head, trained together to continue texts by `follower`, in float32.

    changes: to the configuration. length: tokens of the texts.
    """
    config = CONFIGS[kind] | changes
    write_model(directory, dtype="float32", **config)
    model = mlx_lm.load(str(directory))[0]
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    body = module.Model(module.ModelArgs.from_dict(config | _ALONE))
    embedding = embedding_of(model, VOCABULARY)
    size = config["hidden_size"]
    head = PredictionHead(body, embedding, size, 1e-5, state_first=kind in STATE_FIRST)
    _train(model, head, steps, length)
    weights = dict(tree_flatten(model.parameters()))
    write_weights(directory, weights | published(head, kind))
    return inspect(directory, directory.name, Settings())


def main_model(checkpoint: Checkpoint) -> Any:
    """The model without its head. Not strict: mlx-lm rejects a head's weights under these names."""
    model = load_model(checkpoint.path, strict=False)[0]
    use_chunks()
    return model


def publish(checkpoint: Checkpoint, directory: Path) -> Checkpoint:
    """The same model and head in the form in which its makers publish it.

    Each expert has weights of its own, except in Qwen3.5, where two projections of all are one
    array; latent attention has one projection from the latent to keys and values; Qwen's norms lack
    the 1 that mlx-lm adds, and its convolutions have their axes in another order.
    """
    kind = checkpoint.config["model_type"]
    write_model(directory, dtype="float32", **CONFIGS[kind])
    weights = read_weights(checkpoint.path)
    if kind.startswith("qwen"):
        weights = {name: _of_qwen(name, value) for name, value in weights.items()}
    found: dict[str, mx.array] = {}
    for name, value in weights.items():
        place, _, part = name.partition(".switch_mlp.")
        if name.endswith(".unembed_out.weight"):
            continue
        if name.endswith(".embed_q.weight"):
            place = name.removesuffix(".embed_q.weight")
            both = [value.swapaxes(-1, -2), weights[f"{place}.unembed_out.weight"]]
            joined = mx.concatenate(both, axis=1)
            found[f"{place}.kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
        elif not part:
            found[name] = value
        elif kind != "qwen3_5_moe" or place.startswith("mtp."):
            for expert, own in enumerate(value):
                published_part = part.replace("fc1", "up_proj").replace("fc2", "down_proj")
                found[f"{place}.experts.{expert}.{published_part}"] = own
        elif part == "down_proj.weight":
            found[f"{place}.experts.down_proj"] = value
        elif part == "up_proj.weight":
            pair = [weights[f"{place}.switch_mlp.gate_proj.weight"], value]
            found[f"{place}.experts.gate_up_proj"] = mx.concatenate(pair, axis=1)
    if "model.layers.2.eh_proj.weight" in found:
        # The head's own copies of what it shares with the model.
        found["model.layers.2.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
        found["model.layers.2.shared_head.head.weight"] = weights["lm_head.weight"]
    mx.save_safetensors(str(directory / "model.safetensors"), found, metadata={"format": "pt"})
    return inspect(directory, directory.name, Settings())


def split(checkpoint: Checkpoint, directory: Path) -> Path:
    """The head of a published checkpoint alone, as mlx-vlm splits it."""
    splitter = get_mtp_splitter(source_config=checkpoint.config)
    assert splitter is not None
    return Path(splitter.split(str(checkpoint.path), str(directory)))


def without_head(checkpoint: Checkpoint, directory: Path) -> Path:
    """The same model without its head."""
    shutil.copytree(checkpoint.path, directory)
    kept = read_weights(checkpoint.path)
    names = (".layers.2.", "mtp.", "mtp_layers.")
    write_weights(
        directory,
        {name: value for name, value in kept.items() if not any(own in name for own in names)},
    )
    return directory


def _of_qwen(name: str, value: mx.array) -> mx.array:
    if value.ndim == 1 and "norm" in name and "linear_attn" not in name:
        return value - 1
    return value.moveaxis(2, 1) if name.endswith("conv1d.weight") else value


def follower(token: int) -> int:
    """The token that follows, in the one text that the models know: a cycle of all but 0."""
    return token * 5 % (VOCABULARY + 1) if token * 5 % (VOCABULARY + 1) < VOCABULARY else 1


class Both(Module):
    def __init__(self, model: Any, head: PredictionHead) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.head = model, head


def _train(model: Any, head: PredictionHead, steps: int, length: int) -> None:
    projection = LogitsHead(model, VOCABULARY)
    both: Any = Both(model, head)
    optimizer = Adam(1e-2)

    def loss(both: Both, tokens: mx.array) -> mx.array:
        with projection.watched() as seen:
            logits = both.model(tokens[:, :-1], cache=make_prompt_cache(both.model))
        ahead = both.head(tokens[:, 1:-1], seen[0][:, :-1], cache=both.head.make_cache())
        own = cross_entropy(logits, tokens[:, 1:], reduction="mean")
        return own + cross_entropy(projection.project(ahead), tokens[:, 2:], reduction="mean")

    step = value_and_grad(both, loss)
    dice = random.Random(1)
    for _ in range(steps):
        with functions_of_mlx():
            _, gradients = step(both, mx.array([text(dice, length) for _ in range(_TEXTS)]))
        optimizer.update(both, gradients)
        mx.eval(both.parameters(), optimizer.state)


def text(dice: random.Random, length: int, start: int = 0) -> list[int]:
    """The text that begins with `start`, by default with a random token."""
    found = [start or dice.randrange(1, VOCABULARY)]
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
