"""Checkpoints that transformers 5 saved mean what they meant in the earlier form."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from backend.engine.caching import kv
from backend.engine.vision.multimodal_model import MultimodalModel
from backend.engine.vision.saved_names import in_earlier_form
from backend.engine.vision.vision_builder import _open_multimodal_model
from tests.engine.vision.checkpoint_files import read, write
from tests.engine.vision.families import write_family
from tests.engine.vision.further_families import own_tokens
from tests.engine.vision.seeing import answer_to, asking, seeing, shown
from tests.engine.vision.test_families import FAMILIES
from tests.long import TEST_LONG

BASE, LOCAL = 777.0, 55.0
LINEAR = {"type": "linear", "factor": 8.0}
_TEXT_PARTS = ("thinker_config", "text_config", "language_config")
# Families that have no base, read it from `rope_parameters`, or have it only there.
_OWN = [
    "cohere_compass",
    "gemma4",
    "gemma4_moe",
    "gemma4_unified",
    "glm_ocr",
    "indic_ocr",
    "lfm2_vl",
    "mage_vl",
    "minicpmv4_6",
    "minicpmv4_7",
    "ministral3",
    "mistral4",
    "muse_glimmer",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "zaya1_vl",
]
_WITHOUT = ["glm5_next", "inkling", "kimi_k3", "nemotron_h_nano_omni"]
_EARLIER = [one for one in FAMILIES if one not in _OWN + _WITHOUT]
_AT_TOP = ("ernie4_5_moe_vl", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl")
_SCALING = ["gemma3", "internvl", "kimi_vl", "llava", "llama4", "molmo2", "step3p7"]
_SAMPLE = ["ernie4_5_moe_vl", "gemma3", "hunyuan_vl", "idefics3", "llama4", "qwen2_5_vl"]
_SAMPLE += ["qwen3_omni_moe"]
_SAVED_SAMPLE = ["gemma4_unified", "molmo2", "paddleocr_vl", "qwen2_vl", "step3p7"]


_GEMMA4 = {"final_logit_softcapping": 30.0, "use_double_wide_mlp": True}
_GEMMA4_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
}
# Values of the text part that published configurations state, for which transformers has another
# default.
_STATED: dict[str, dict[str, Any]] = {
    "aya_vision": {"rope_theta": 50000.0},
    "cohere_compass": {"tie_word_embeddings": False},
    "gemma4": _GEMMA4 | _GEMMA4_ROPE,
    "gemma4_moe": _GEMMA4 | _GEMMA4_ROPE,
    "gemma4_unified": _GEMMA4,
    "glm5_next": {"mlp_layer_types": ["dense", *["sparse"] * 3]},
    "granite4_vision": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 10.0,
        "tie_word_embeddings": True,
    },
    "kimi_k25": {"routed_scaling_factor": 1.0},
    "minimax_m3_vl": {"rotary_dim": 16},
    "mistral4": {"rope_interleave": True},
    "muse_glimmer": {"layer_rope_theta": [500000.0, 0, 500000.0, 0]},
    "qwen2_5_vl": {"tie_word_embeddings": True},
    "qwen4_exp": {"output_gate_type": "sigmoid"},
}
_STATED_OF_TOWER = {
    "internvl": {"attention_bias": True},
    "llava_onevision": {"vision_use_head": False},
}


@pytest.mark.parametrize("family", FAMILIES if TEST_LONG else _SAVED_SAMPLE)
def test_what_transformers_saves_means_the_same(tmp_path: Path, family: str) -> None:
    path = write_family(tmp_path / family, family)
    earlier = read(path, "config.json")
    if earlier["model_type"] not in CONFIG_MAPPING:
        pytest.skip("transformers does not have it")
    _text_of(earlier).update(_STATED.get(family, {}))
    earlier.get("vision_config", {}).update(_STATED_OF_TOWER.get(family, {}))
    saved = json.loads(
        CONFIG_MAPPING[earlier["model_type"]].from_dict(deepcopy(earlier)).to_json_string()
    )
    assert mx.allclose(_logits(path, saved), _logits(path, earlier), atol=1e-4)


def test_null_may_mean_the_value_of_another_field() -> None:
    text = {"model_type": "qwen4_exp_text", "hidden_act": "silu", "output_gate_type": None}
    found = in_earlier_form({"model_type": "qwen4_exp", "text_config": text})
    assert found["text_config"]["output_gate_type"] == "silu"


@pytest.mark.parametrize("family", _EARLIER if TEST_LONG else _SAMPLE)
def test_the_base_and_the_sections_are_read_from_rope_parameters(
    tmp_path: Path, family: str
) -> None:
    path = write_family(tmp_path / family, family)
    written = read(path, "config.json")
    _require_same_logits(path, _with_base(written), unlike=written)


@pytest.mark.parametrize("family", _SCALING if TEST_LONG else _SCALING[:2])
def test_the_scaling_is_read_from_rope_parameters(tmp_path: Path, family: str) -> None:
    path = write_family(tmp_path / family, family)
    plain = _with_base(read(path, "config.json"))
    earlier = deepcopy(plain)
    _text_of(earlier)["rope_scaling"] = LINEAR
    # DeepSeek's layers take no linear scaling.
    if family == "kimi_vl":
        _text_of(earlier)["rope_scaling"] = {
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "mscale_all_dim": 1.0,
        }
    _require_same_logits(path, earlier, unlike=plain)


@pytest.mark.parametrize("family", _OWN if TEST_LONG else _OWN[:2])
def test_what_a_family_reads_itself_is_left_alone(tmp_path: Path, family: str) -> None:
    from mlx_vlm.utils import load_model

    path = write_family(tmp_path / family, family)
    config = read(path, "config.json")
    text = _text_of(config)
    held = text.get("rope_parameters") or {"rope_type": "default"}
    text.pop("rope_theta", None)
    text["rope_parameters"] = held | {"rope_theta": BASE}
    if family.startswith("gemma4"):
        full, sliding = held | {"rope_theta": BASE}, held | {"rope_theta": LOCAL}
        text["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
    read_by_us = _logits(path, config)
    model = MultimodalModel(load_model(path, lazy=True))
    assert mx.array_equal(read_by_us, _of(model))


def test_a_tower_has_a_base_too() -> None:
    rope = {"rope_theta": BASE, "rope_type": "axial"}
    found = in_earlier_form({"model_type": "llama4", "vision_config": {"rope_parameters": rope}})
    assert found["vision_config"] == {"rope_theta": BASE}


def test_sections_that_nothing_states_are_those_of_the_family() -> None:
    rope = {"rope_theta": BASE, "rope_type": "default"}
    found = in_earlier_form({"model_type": "qwen3_vl", "text_config": {"rope_parameters": rope}})
    assert found["text_config"] == {"rope_parameters": rope, "rope_theta": BASE}


def test_a_text_model_that_only_mlx_vlm_has() -> None:
    found = in_earlier_form({"model_type": "hy_v4", "rope_parameters": {"rope_theta": BASE}})
    assert found["rope_theta"] == BASE


@pytest.mark.parametrize("family", _AT_TOP if TEST_LONG else _AT_TOP[2:3])
async def test_an_image_gets_the_same_answer(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_family(tmp_path / family, family)
    own_tokens(path, monkeypatch)
    earlier = _with_base(read(path, "config.json"))
    answers = []
    for config in (earlier, _saved_by_transformers_5(earlier)):
        write(path, "config.json", config)
        async with seeing(path) as engine:
            answers.append(await answer_to(engine, asking("What is it?", shown("red"))))
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].prompt_tokens == answers[1].prompt_tokens


def _with_base(config: dict[str, Any]) -> dict[str, Any]:
    found = deepcopy(config)
    text = _text_of(found)
    if found["model_type"] == "gemma3":
        text["rope_global_base_freq"] = BASE
    else:
        text["rope_theta"] = BASE
    if found["model_type"].startswith("gemma3"):
        text["rope_local_base_freq"] = LOCAL
    return found


def _saved_by_transformers_5(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers 5 makes of it; its class of HunyuanOCR names sections in its own way."""
    found = deepcopy(config)
    for part in (_text_of(found), found.get("vision_config", {})):
        scaling = part.pop("rope_scaling", None) or {}
        kind = scaling.pop("type", None) or scaling.get("rope_type") or "default"
        if "xdrope_section" in scaling:
            scaling["mrope_section"] = scaling.pop("xdrope_section")
        rope = scaling | {
            "rope_theta": part.pop("rope_global_base_freq", part.pop("rope_theta", None)),
            "rope_type": {"mrope": "default", "xdrope": "dynamic"}.get(kind, kind),
        }
        if "partial_rotary_factor" in part:
            rope["partial_rotary_factor"] = part.pop("partial_rotary_factor")
        if (local := part.pop("rope_local_base_freq", None)) is not None:
            sliding = {"rope_theta": local, "rope_type": "default"}
            rope = {"full_attention": rope, "sliding_attention": sliding}
        if rope.get("rope_theta", BASE) is not None:
            part["rope_parameters"] = rope
    if found["model_type"] in _AT_TOP:  # among them the end tokens
        kept = ("model_type", "vision_config", "architectures")
        names = [one for one in found if one not in kept and not one.startswith("image")]
        found["text_config"] = {name: found.pop(name) for name in names}
    return found


def _text_of(config: dict[str, Any]) -> dict[str, Any]:
    part = next((config[name] for name in _TEXT_PARTS if name in config), None)
    return config if part is None else _text_of(part)


def _require_same_logits(path: Path, earlier: dict[str, Any], unlike: dict[str, Any]) -> None:
    """Require that both forms of a configuration compute the same, and `unlike` something else."""
    expected = _logits(path, earlier)
    assert mx.allclose(_logits(path, _saved_by_transformers_5(earlier)), expected)
    assert not mx.allclose(_logits(path, unlike), expected, atol=1e-2), "it would hide a fault"


def _logits(path: Path, config: dict[str, Any]) -> mx.array:
    write(path, "config.json", config)
    return _of(_open_multimodal_model(path)[0])


def _of(model: Any) -> mx.array:
    logits: mx.array = model(mx.array([list(range(20, 60))]), cache=kv.new_row(model))
    return logits
