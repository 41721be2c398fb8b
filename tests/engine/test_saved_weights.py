"""`saved_weights`: weights of transformers, for families of which mlx-lm reads another form."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from backend.engine.loading.weights import mlx_lm_classes
from tests.architectures.shapes import configuration
from tests.engine.folder_changes import put
from tests.engine.loading_models import write_weights

Weights = dict[str, mx.array]


def saved_gpt2(weights: Weights) -> Weights:
    """Under `transformer.`, and with matrices of (inputs, outputs)."""
    return {
        f"transformer.{name.removeprefix('model.')}": value.T
        if value.ndim == 2 and ".c_" in name
        else value
        for name, value in weights.items()
    }


def saved_gpt_oss(weights: Weights) -> Weights:
    """Experts in matrices of (experts, inputs, outputs), in which gate and value alternate."""
    found = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in {name.partition(".experts.")[0] for name in weights.keys() - found.keys()}:
        here = f"{layer}.experts"
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            parts = [weights[f"{here}.{part}_proj.{kind}"] for part in ("gate", "up", "down")]
            if kind == "weight":
                parts = [part.swapaxes(1, 2) for part in parts]
            joined = mx.stack(parts[:2], axis=-1).reshape(*parts[0].shape[:-1], -1)
            found[f"{here}.gate_up_proj{suffix}"] = joined
            found[f"{here}.down_proj{suffix}"] = parts[2]
    return found


@pytest.mark.parametrize(
    ("model_type", "saved"), [("gpt2", saved_gpt2), ("gpt_oss", saved_gpt_oss)]
)
def test_weights_of_transformers_are_loaded(
    model_type: str, saved: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    config = configuration(model_type)
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(2)
    model = module.Model(module.ModelArgs.from_dict(config))
    write_weights(tmp_path, saved(dict(tree_flatten(model.parameters()))))
    put("config.json", config)(tmp_path)
    loaded, _ = load_model(tmp_path, get_model_classes=mlx_lm_classes)
    ids = mx.array([[*range(5, 25)]])
    assert mx.allclose(loaded(ids), model(ids), atol=1e-5)
