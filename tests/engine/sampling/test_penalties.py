"""Bias and penalties against values computed by hand."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_frequency_penalty, make_presence_penalty

from backend.engine.request import WHOLE, Sampling
from backend.engine.sampling.penalties import BatchPenalties, Past

LOGITS = [2.0, -1.0, 0.5, 0.0, -4.0, 3.0]
PROMPT = (1, 4)


def _changed(
    sampling: Sampling, generated: tuple[int, ...] = (), prompt: tuple[int, ...] = PROMPT
) -> list[float]:
    """The logits after prompt and output, where the last token is the one just fed."""
    tokens = [*prompt, *generated]
    penalties = BatchPenalties([sampling], [Past(tokens[:-1], len(prompt), 100)], len(LOGITS))
    fed = mx.array([tokens[-1]], dtype=mx.uint32)
    changed: Any = penalties(mx.array([LOGITS]), fed, [len(generated)]).tolist()
    return [round(value, 4) for value in changed[0]]


@pytest.mark.parametrize(
    ("sampling", "generated", "expected"),
    [
        # A bias is added, and the same token may be biased and penalised.
        (Sampling(logit_bias=((0, -100.0), (5, 1.5))), (), [-98, -1, 0.5, 0, -4, 4.5]),
        # Prompt tokens 1 and 4 count; positive logits are divided, others multiplied.
        (Sampling(repetition=2.0), (), [2, -2, 0.5, 0, -8, 3]),
        (Sampling(repetition=2.0), (5, 0, 3), [1, -2, 0.5, 0, -8, 1.5]),
        # The window covers the latest tokens of prompt and output: here 4, 5 and 0, then only 0.
        (Sampling(repetition=2.0, window=3), (5, 0), [1, -1, 0.5, 0, -8, 1.5]),
        (Sampling(repetition=2.0, window=1), (5, 0), [1, -1, 0.5, 0, -4, 3]),
        (Sampling(repetition=2.0, window=WHOLE), (5, 0), [1, -2, 0.5, 0, -8, 1.5]),
        # Below 1 it favours tokens that occurred.
        (Sampling(repetition=0.5), (0,), [4, -0.5, 0.5, 0, -2, 3]),
        # Additive penalties count only the output: 0 three times, 2 once.
        (Sampling(frequency=0.5), (0, 2, 0, 0), [0.5, -1, 0, 0, -4, 3]),
        (Sampling(presence=0.75), (0, 2, 0, 0), [1.25, -1, -0.25, 0, -4, 3]),
        (Sampling(frequency=0.5, presence=0.25), (0, 2, 0), [0.75, -1, -0.25, 0, -4, 3]),
        (Sampling(frequency=-1.0), (4,), [2, -1, 0.5, 0, -3, 3]),
        (Sampling(frequency=1.0), (4,), [2, -1, 0.5, 0, -5, 3]),
        (Sampling(presence=1.0), (4,), [2, -1, 0.5, 0, -5, 3]),
        (Sampling(frequency=2.0, presence=2.0), (), LOGITS),
        # With a window they work as in mlx-lm and count prompt tokens too: here 4, 0 and 0.
        (Sampling(frequency=0.5, frequency_window=3), (0, 0), [1, -1, 0.5, 0, -4.5, 3]),
        (Sampling(presence=0.5, presence_window=3), (0, 0), [1.5, -1, 0.5, 0, -4.5, 3]),
        (Sampling(presence=0.5, presence_window=9), (), [2, -1.5, 0.5, 0, -4.5, 3]),
        # A window of one penalty does not change what the other counts.
        (
            Sampling(frequency=0.5, presence=0.25, presence_window=1),
            (0, 0, 2),
            [1, -1, -0.25, 0, -4, 3],
        ),
        # Together, in llama.cpp's order: bias, repetition, then the additive ones.
        (
            Sampling(logit_bias=((0, 2.0),), repetition=2.0, frequency=0.5, presence=0.25),
            (0,),
            [1.25, -2, 0.5, 0, -8, 3],
        ),
    ],
)
def test_values_computed_by_hand(
    sampling: Sampling, generated: tuple[int, ...], expected: list[float]
) -> None:
    assert _changed(sampling, generated) == expected


def test_memory_that_grows_equals_memory_built_anew() -> None:
    rows = [
        Sampling(repetition=1.5, window=3),
        Sampling(),
        Sampling(repetition=1.2, window=WHOLE, frequency=0.3),
        Sampling(presence=1.0),
        Sampling(presence=0.4, presence_window=2, frequency=0.3, frequency_window=5),
    ]
    rng = np.random.default_rng(3)
    tokens = [list(PROMPT) for _ in rows]
    pasts = [Past(own[:-1], 2, 100) for own in tokens]
    growing = BatchPenalties(rows, pasts, len(LOGITS))
    for step in range(12):
        fed = mx.array([own[-1] for own in tokens], dtype=mx.uint32)
        grown = growing(mx.array([LOGITS] * 5), fed, [step] * 5)
        for at, row in enumerate(rows):
            anew = _changed(row, tuple(tokens[at][2:]))
            assert np.round(np.array(grown[at]), 4).tolist() == pytest.approx(anew)
        for own in tokens:
            own.append(int(rng.integers(len(LOGITS))))


def test_a_masked_token_stays_masked() -> None:
    never = float("-inf")
    penalties = BatchPenalties(
        [Sampling(repetition=1.5, presence=-2.0, logit_bias=((0, 5.0),))],
        [Past((0, 1), 1, 9)],
        3,
    )
    changed = penalties(mx.array([[never, never, 1.0]]), mx.array([1], dtype=mx.uint32), [2])
    assert changed.tolist() == [[never, never, 1.0]]


@pytest.mark.parametrize("window", [1, 4, 20])
def test_windows_are_those_of_mlx_lm(window: int) -> None:
    rng = np.random.default_rng(window)
    tokens = tuple(int(token) for token in rng.integers(len(LOGITS), size=12))
    for kind, processor in (
        ("presence", make_presence_penalty(0.5, window)),
        ("frequency", make_frequency_penalty(0.5, window)),
    ):
        theirs: Any = processor(mx.array(tokens), mx.array([LOGITS])).tolist()
        asked: dict[str, Any] = {kind: 0.5, f"{kind}_window": window}
        assert _changed(Sampling(**asked), tokens[7:], tokens[:7]) == theirs[0]
