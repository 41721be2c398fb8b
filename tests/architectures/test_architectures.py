"""Text architectures, built small: alone, in a batch, in later turns, after a cancellation.

They are all of mlx-lm's, and those that only mlx-vlm has.

`make test` takes every fifth and those with caches of their own; `make test-long` and
`make test-models` take all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest

from backend.engine.loading.serving_trial import TEXT_ON_CPU
from tests.architectures.comparison import compare, sensitive
from tests.architectures.shapes import (
    DISAGREES,
    UNBUILT,
    architectures,
    quantised_model,
    tiny_model,
)
from tests.architectures.vlm_shapes import VLM_ARCHITECTURES, tiny_vlm_model
from tests.long import TEST_LONG

_ALL = architectures()
_ONLY_OF_VLM = VLM_ARCHITECTURES if TEST_LONG else ["minimax_m3"]
# Windows, recurrent state, latent KV, shared KV, compressed KV, a convolution beside attention, and
# attention to blocks of keys.
_KINDS = (
    *(
        "afm7",
        "baichuan_m1",
        "deepseek_v41",
        "falcon_h1",
        "gemma3n",
        "lfm2",
        "mamba2",
        "minimax_m3_vl",
    ),
    "qwen3_5",
)
_COSTLY = ("phi3small",)  # its vocabulary cannot be small
_SAMPLE = sorted({*_ALL[::5], *_KINDS}.difference(_COSTLY))
_BUILT = [one for one in _ALL if one not in UNBUILT and one not in DISAGREES]
_QUANTISED = _BUILT[1 :: 5 if TEST_LONG else 40]
_FEW_TOKENS = 16  # of an answer of a quantised model, which is slow on a CPU
_CHOSEN = [*(_ALL if TEST_LONG else _SAMPLE), *_ONLY_OF_VLM]


@pytest.mark.parametrize("architecture", _CHOSEN)
def test_answers_equal_those_of_plain_forward_passes(
    architecture: str, record_property: Callable[[str, object], None]
) -> None:
    if why := UNBUILT.get(architecture):
        record_property("unbuilt", why)
        pytest.skip(why)
    of_vlm = architecture in VLM_ARCHITECTURES
    model = tiny_vlm_model(architecture) if of_vlm else tiny_model(architecture)
    assert sensitive(model, list(range(1, 40))), "it would hide a fault"
    found = compare(model, architecture)
    for what, value in asdict(found).items():
        record_property(what, value)
    if not (of_vlm or TEST_LONG):  # `make test-models` makes the table
        assert found.way == TEXT_ON_CPU[architecture]
    if why := DISAGREES.get(architecture):
        record_property("disagrees", why)
        assert found.alone, found
    else:
        assert found.right, found


@pytest.mark.parametrize("architecture", _QUANTISED)
def test_quantised_answers_equal_those_of_plain_forward_passes(
    architecture: str,
) -> None:
    found = compare(quantised_model(architecture), architecture, _FEW_TOKENS)
    assert found.right, found
