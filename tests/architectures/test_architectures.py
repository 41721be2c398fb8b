"""Text architectures of mlx-lm, built small: alone, in company, in later turns, after a cancel.

`make test` takes every fourth and those with caches of their own; `make test-models` takes all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict

import pytest

from tests.architectures.comparison import compare, sensitive
from tests.architectures.shapes import UNBUILT, architectures, tiny_model

_ALL = architectures()
# Windows, recurrent state, latent KV, shared KV, compressed KV, a convolution beside attention.
_KINDS = ("baichuan_m1", "deepseek_v41", "falcon_h1", "gemma3n", "lfm2", "mamba2", "qwen3_5")
_SAMPLE = sorted({*_ALL[::5], *_KINDS})
_CHOSEN = _ALL if os.environ.get("EVERY_ARCHITECTURE") else _SAMPLE


@pytest.mark.parametrize("architecture", _CHOSEN)
def test_it_answers_as_its_own_forward_passes(
    architecture: str, record_property: Callable[[str, object], None]
) -> None:
    if why := UNBUILT.get(architecture):
        record_property("unbuilt", why)
        pytest.skip(why)
    model = tiny_model(architecture)
    assert sensitive(model, list(range(1, 40))), "it would hide a fault"
    found = compare(model, architecture)
    for what, value in asdict(found).items():
        record_property(what, value)
    assert found.right, found
