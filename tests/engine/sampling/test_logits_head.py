"""The logits of a prompt's last token, without those of the other tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers.quantized import quantize

from backend.engine.caching import kv
from backend.engine.sampling.logits_head import LogitsHead
from tests.engine.kv_models import MODELS, kv_model, words
from tests.engine.random_models import VOCABULARY

COUNTS = [5, 9, 1]


class Watched:
    """A model that records the shapes of its logits; its layers are those of `inside`."""

    def __init__(self, model: Any, inside: Any) -> None:
        self._model, self.layers, self.named_modules = model, model.layers, inside
        self.shapes: list[tuple[int, ...]] = []

    def make_cache(self) -> Any:
        return kv.new_row(self._model)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache)
        self.shapes.append(logits.shape)
        return logits


def _padded() -> mx.array:
    return mx.array([[*words(count, 3), *[0] * (max(COUNTS) - count)] for count in COUNTS])


def _each_alone(model: Any) -> mx.array:
    alone = [model(mx.array([words(n, 3)]), cache=kv.new_row(model))[0, -1] for n in COUNTS]
    return mx.stack(alone)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("known", [True, False])
def test_each_row_gets_the_logits_of_its_last_token(kind: str, known: bool) -> None:
    model = kv_model(kind)
    expected = _each_alone(model)
    watched = Watched(model, model.named_modules if known else list)
    head = LogitsHead(watched, VOCABULARY)
    assert head.found is known
    rows = [kv.new_row(model) for _ in COUNTS]
    counts = COUNTS if kv.can_prefill_together(model) else COUNTS[:1]
    tokens = _padded()[: len(counts), : max(counts)]
    batch = kv.BatchCache(rows[: len(counts)])

    def run() -> mx.array:
        with batch.prefill(counts) as layers:
            return watched(tokens, layers)

    logits = head.last(run, counts)
    assert logits.shape == (len(counts), VOCABULARY)
    assert mx.allclose(logits, expected[: len(counts)], atol=1e-3)
    assert watched.shapes[-1][1] == (1 if known else max(counts))
    assert model(tokens, cache=kv.BatchCache([kv.new_row(model) for _ in counts]).layers).shape == (
        len(counts),
        max(counts),
        VOCABULARY,
    )


def test_a_quantised_head_is_recognised_too() -> None:
    for tied in (True, False):
        model = kv_model("attention", tie_word_embeddings=tied)
        quantize(model, group_size=32, bits=8)
        assert LogitsHead(model, VOCABULARY).found


def test_two_heads_of_one_model_are_independent() -> None:
    model = kv_model("attention")
    heads = [LogitsHead(model, VOCABULARY) for _ in range(2)]
    tokens = mx.array([words(7, 3)])
    whole = model(tokens, cache=kv.new_row(model))
    for head in heads:
        assert head.found
        last = head.last(lambda: model(tokens, cache=kv.new_row(model)), [7])
        assert mx.allclose(last, whole[:, -1], atol=1e-3)


def test_a_wide_layer_that_is_not_the_head_is_not_narrowed() -> None:
    """An adapter adds to the layer's output, so narrowing the layer alone would be wrong."""
    model = kv_model("attention", tie_word_embeddings=False)
    kind = type(model.lm_head)

    class Added(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, linear: Any) -> None:
            super().__init__()
            self.linear = linear

        def __call__(self, states: mx.array) -> mx.array:
            added: mx.array = self.linear(states) + states.sum(-1, keepdims=True)
            return added

    model.lm_head = Added(model.lm_head)
    head = LogitsHead(model, VOCABULARY)
    assert not head.found
    assert type(model.lm_head.linear) is kind
    tokens = mx.array([words(7, 3)])
    whole = model(tokens, cache=kv.new_row(model))
    last = head.last(lambda: model(tokens, cache=kv.new_row(model)), [7])
    assert mx.allclose(last, whole[:, -1])
