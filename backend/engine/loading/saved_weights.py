"""Changes weights that transformers saves to the names and layouts that mlx-lm reads.

mlx-lm reads these families as they were first published. transformers saves GPT-2 under other
names, and the experts of gpt-oss, unless they are quantised, in another layout; nearly all
fine-tuned models of both families have these forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx


def with_saved_weights(family: Any, config: Mapping[str, Any]) -> Any:
    """Return a subclass of a family of mlx-lm that reads all of its forms; `family` if it does."""
    model_type = config["model_type"]
    if model_type not in ("deepseek_v3", "gpt2", "gpt_oss"):
        return family

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        if model_type == "deepseek_v3":
            # mlx-lm drops the head for multi-token prediction, which is one more layer, if its
            # number is 61. In smaller models, the head has another number.
            head = f"model.layers.{config['num_hidden_layers']}."
            weights = {name: each for name, each in weights.items() if not name.startswith(head)}
        elif model_type == "gpt_oss":
            weights = _dense_experts(weights)
        else:
            weights = {name.removeprefix("transformer."): each for name, each in weights.items()}
        found: dict[str, mx.array] = family.sanitize(self, weights)
        return found

    members = {"sanitize": sanitize, "__module__": family.__module__}
    return type(family.__name__, (family,), members)


def _dense_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights of gpt-oss with experts that are not quantised in mlx-lm's layout.

    Checkpoints in bfloat16, such as fine-tuned ones, have matrices of (experts, inputs, outputs).
    """
    found: dict[str, mx.array] = {}
    for name, value in weights.items():
        before, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for at, part in enumerate(("gate_proj", "up_proj")):
                found[f"{before}.{part}.weight"] = value[..., at::2].swapaxes(1, 2)
                bias = weights[f"{name}_bias"]
                found[f"{before}.{part}.bias"] = bias[..., at::2]
        elif leaf == "down_proj":
            found[f"{name}.weight"] = value.swapaxes(1, 2)
        elif leaf == "down_proj_bias" and f"{before}.down_proj" in weights:
            found[f"{before}.down_proj.bias"] = value
        elif leaf != "gate_up_proj_bias" or f"{before}.gate_up_proj" not in weights:
            found[name] = value
    return found
