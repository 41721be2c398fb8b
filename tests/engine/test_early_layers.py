"""Layers that start computing before the graph of their pass is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.caching import kv
from backend.engine.disk_cache.layout import learn_layout
from backend.engine.loading.early_layers import only_building, start_layers_early
from tests.engine.random_models import CONFIGS, VOCABULARY, random_model

PROMPT, LATER = [[5, 6, 7, 8, 9]], [[10], [11], [12]]


def _answers(model: Any) -> list[np.ndarray]:
    row = kv.new_row(model)
    return [
        np.array(model(mx.array(tokens), cache=row)) for tokens in (PROMPT, *([t] for t in LATER))
    ]


@pytest.mark.parametrize("kind", CONFIGS)
def test_layers_that_start_early_compute_the_same(kind: str) -> None:
    expected = _answers(random_model(kind))
    model = random_model(kind)
    start_layers_early(model)
    for got, plain in zip(_answers(model), expected, strict=True):
        np.testing.assert_array_equal(got, plain)


def test_only_what_follows_the_last_layer_is_left_to_compute(tmp_path: Path) -> None:
    def left(model: Any) -> int:
        file = tmp_path / "graph.dot"
        mx.export_to_dot(str(file), model(mx.array(PROMPT)))
        return file.read_text().count("label")

    model = random_model("full")
    whole = left(model)
    start_layers_early(model)
    assert left(model) < whole / 4


def test_a_pass_that_is_only_built_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(mx, "async_eval", started.append)
    model = random_model("full")
    start_layers_early(model)
    with only_building():
        assert kv.vocabulary_size(model) == VOCABULARY
        assert learn_layout(model) is not None
    assert not started
    kv.vocabulary_size(model)
    assert len(started) == len(model.layers)


def test_a_layer_that_is_used_twice_starts_once() -> None:
    model = random_model("full")
    kind = type(model.layers[0])
    model.model.layers[1] = model.layers[0]
    start_layers_early(model)
    assert [type(layer).__mro__[1] for layer in model.layers] == [kind, kind]


def test_a_model_without_layers_is_left_as_it_is() -> None:
    start_layers_early(object())
