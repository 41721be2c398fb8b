"""Checkpoints that transformers 5 saved mean what they meant in the earlier form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.engine.device import Device
from backend.engine.loading.checkpoint import inspect
from backend.engine.loading.earlier_fields import earlier_fields
from backend.engine.loading.weights import load_model
from backend.engine.settings import Settings
from backend.engine.units import GIB
from tests.engine.loading_models import write_model
from tests.engine.loads import at_once

CPU = Device("cpu", "a CPU", 64 * GIB, 64 * GIB)
FACTOR = {"rope_type": "linear", "factor": 8.0}
FULL = {"rope_theta": 777.0} | FACTOR
SLIDING = {"rope_theta": 55.0, "rope_type": "default"}


def _logits(path: Path, **rope: Any) -> mx.array:
    config = json.loads((path / "config.json").read_text())
    kept = {name: value for name, value in config.items() if not name.startswith("rope_")}
    (path / "config.json").write_text(json.dumps(kept | rope))
    settings = Settings()
    loaded = at_once(load_model(inspect(path, path.name, settings), settings, CPU, dtype=""))
    logits: mx.array = loaded.model(mx.array([list(range(5, 40))]))
    return logits


def test_llama_saved_by_transformers_5(tmp_path: Path) -> None:
    path = write_model(tmp_path / "it")
    earlier = _logits(path, rope_theta=777.0, rope_scaling=FACTOR)
    assert mx.allclose(_logits(path, rope_parameters=FULL), earlier)
    assert not mx.allclose(_logits(path, rope_parameters={"rope_theta": 777.0}), earlier)
    assert not mx.allclose(_logits(path), earlier, atol=1e-2)


SCALED = {"rope_scaling": FULL | {"type": "linear"}}
MULTIMODAL = {"rope_type": "default", "mrope_section": [4, 6, 6]}
PLAIN = {"rope_theta": 55.0, "rope_type": "default", "partial_rotary_factor": 0.4}


@pytest.mark.parametrize(
    ("known", "rope", "found"),
    [
        (["rope_theta", "rope_scaling"], FULL, {"rope_theta": 777.0} | SCALED),
        (["rotary_emb_base", "rotary_pct"], PLAIN, {"rotary_emb_base": 55.0, "rotary_pct": 0.4}),
        (["rope_theta", "rope_scaling"], SLIDING, {"rope_theta": 55.0, "rope_scaling": None}),
        (
            ["rope_theta", "rope_scaling", "rope_local_base_freq"],
            {"full_attention": FULL, "sliding_attention": SLIDING},
            {"rope_theta": 777.0, "rope_local_base_freq": 55.0} | SCALED,
        ),
        (  # OLMo 3: only layers with full attention are scaled
            ["rope_theta", "rope_scaling"],
            {"full_attention": FULL, "sliding_attention": SLIDING | {"rope_theta": 777.0}},
            {"rope_theta": 777.0} | SCALED,
        ),
        (["rope_scaling"], {"type": "yarn"}, {"rope_scaling": {"type": "yarn"}}),
        (
            ["rope_theta", "rope_scaling"],
            {"main": SLIDING, "compress": FULL},
            {"rope_theta": 55.0} | SCALED,
        ),
        (["rope_scaling"], MULTIMODAL, {"rope_scaling": MULTIMODAL | {"type": "default"}}),
        (["rope_theta", "rope_parameters"], FULL, {}),
    ],
)
def test_the_earlier_fields(known: list[str], rope: dict[str, Any], found: dict[str, Any]) -> None:
    assert earlier_fields({"rope_parameters": rope}, known) == found
    given = dict.fromkeys(found, 3)
    assert earlier_fields({"rope_parameters": rope} | given, known) == {}


def test_values_for_one_kind_of_layer_that_the_family_cannot_have() -> None:
    rope = {"full_attention": FULL, "sliding_attention": SLIDING}
    with pytest.raises(ValueError, match="gives layers with sliding_attention values of their own"):
        earlier_fields({"rope_parameters": rope}, ["rope_theta", "rope_scaling"])


_KINDS = ["sliding_attention", "full_attention"] * 2
_GEMMA = ["head_dim", "global_head_dim", "num_global_key_value_heads"]


def test_values_of_layers_of_one_kind() -> None:
    layers = {"1": {"head_dim": 32, "num_key_value_heads": 1}}
    config = {"layer_types": _KINDS, "head_dim": 16, "num_key_value_heads": 2}
    same = {**config, "per_layer_config": layers | {"3": layers["1"]}}
    found = {"global_head_dim": 32, "num_global_key_value_heads": 1}
    assert earlier_fields(same, _GEMMA) == found
    assert earlier_fields(same | {"global_head_dim": 8}, _GEMMA) == {
        "num_global_key_value_heads": 1
    }
    for known, other in ((_GEMMA, layers), (["head_dim"], same["per_layer_config"])):
        with pytest.raises(ValueError, match=r"layers with full_attention values of their own for"):
            earlier_fields({**config, "per_layer_config": other}, known)


def test_an_order_of_layers_that_a_period_cannot_express() -> None:
    kinds = ["linear_attention", "full_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"layer_types in config.json has no regular order"):
        earlier_fields({"layer_types": kinds}, ["full_attention_interval"])
    assert earlier_fields({"layer_types": kinds}, ["layer_types"])["layer_types"] == kinds


_SPARSE = {"mlp_layer_types": ["dense", "sparse"], "layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"n_positions": 64, "model_type": "gpt2"}, {"n_ctx": 64}),
        (
            {"hidden_size": 64, "num_attention_heads": 4, "rope_parameters": PLAIN},
            {"head_dim": 16},
        ),
        ({"hidden_size": 64, "num_attention_heads": 4}, {}),  # another form may mean another size
        ({"hidden_size": 64, "expand": 2}, {"intermediate_size": 128}),
        (_SPARSE, {"is_moe_layer": [False, True], "first_k_dense_replace": 1}),
        (_SPARSE | {"model_type": "exaone4"}, {"sliding_window_pattern": "L"}),
        ({"model_type": "apertus"}, {"qk_norm": True, "post_norm": False, "mlp_bias": False}),
    ],
)
def test_fields_that_transformers_does_not_save(
    config: dict[str, Any], found: dict[str, Any]
) -> None:
    known = [*found, "head_dim"]
    assert earlier_fields(config, known) == found
    assert earlier_fields(config | {"head_dim": 8}, known).get("head_dim") is None


def test_minimax_with_layers_that_mlx_lm_does_not_have() -> None:
    config = {"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"]}
    with pytest.raises(ValueError, match=r"layer_types in config.json has layers without full"):
        earlier_fields(config, [])
