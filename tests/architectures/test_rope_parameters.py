"""Every text architecture of mlx-lm takes RoPE's base from where transformers 5 writes it."""

from __future__ import annotations

from typing import Any

import pytest

from backend.engine.loading import weights
from tests.architectures.shapes import UNBUILT, architectures, configuration

BASE = 777.0
_EARLIER = {"rope_theta", "rotary_emb_base"}


@pytest.mark.parametrize("architecture", [one for one in architectures() if one not in UNBUILT])
def test_the_base_is_read_from_rope_parameters(architecture: str) -> None:
    earlier = configuration(architecture)
    config = _in_later_form(earlier)
    if config == earlier:
        pytest.skip("it has no base of its own, or reads rope_parameters itself")
    _, arguments = weights.mlx_lm_classes(config)
    read = arguments.from_dict(config)
    part = getattr(read, "text_config", None)
    found = [one for held in (read, part) if held is not None for one in _bases(held)]
    assert found
    assert set(found) == {BASE}


def _in_later_form(config: dict[str, Any]) -> dict[str, Any]:
    later = dict(config)
    if "text_config" in config:
        later["text_config"] = _in_later_form(config["text_config"])
    if _EARLIER & config.keys() and "rope_parameters" not in config:
        for name in (*_EARLIER, "rope_scaling"):
            later.pop(name, None)
        later["rope_parameters"] = {"rope_type": "default", "rope_theta": BASE}
    return later


def _bases(held: Any) -> list[Any]:
    values = held if isinstance(held, dict) else vars(held)
    found = [values[name] for name in _EARLIER if values.get(name) is not None]
    rope = values.get("rope_parameters") or {}
    return found or [rope[name] for name in _EARLIER if name in rope]
