"""The tokens that filters keep, against the definition of each filter."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from backend.engine import device
from backend.engine.request import Sampling
from backend.engine.sampling.filters import Candidates, columns, filtered, reach
from tests.engine.filter_definitions import Undecided, kept


def _kept(left: Candidates, at: int, vocabulary: int) -> np.ndarray:
    inside = np.array(left.logits[at]) > -np.inf
    if left.ids is None:
        return inside
    keep = np.zeros(vocabulary, dtype=bool)
    keep[np.array(left.ids[at])[inside]] = True
    return keep


def _kind(row: Sampling, vocabulary: int) -> tuple[int, bool]:
    """Rows of the same kind may be filtered together."""
    return reach(row, vocabulary), row.top_k > 0


ROWS = st.builds(
    Sampling,
    top_k=st.sampled_from([0, 1, 2, 37, 64, 65, 1000, 2999]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.6, 1e-9]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.999, 1e-30]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 1e-6, 1.0]),
    xtc_probability=st.sampled_from([0.0, 0.0, 1.0]),
    xtc_threshold=st.sampled_from([0.1, 0.013, 0.0, 0.5]),
)


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    st.lists(ROWS, min_size=1, max_size=4),
    st.sampled_from([3000, 4001]),
    st.sampled_from([0.0, 0.2, 2.0, 8.0]),
    st.sampled_from([None, 0.25, 1.0]),
    st.sampled_from([0.0, 0.5, 0.999]),
    st.integers(0, 2**32 - 1),
)
def test_they_keep_what_their_definitions_keep(
    rows: list[Sampling],
    vocabulary: int,
    spread: float,
    step: float | None,
    masked: float,
    seed: int,
) -> None:
    """spread: of the logits; 0 means all are equal. step: the logits are multiples of it."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (len(rows), vocabulary)).astype(np.float32)
    if step is not None:
        logits = np.round(logits / step) * np.float32(step)
    logits[rng.random(logits.shape) < masked] = -np.inf
    logits[:, rng.integers(vocabulary)] = 1.0
    kind = _kind(rows[0], vocabulary)
    at = [place for place, row in enumerate(rows) if _kind(row, vocabulary) == kind]
    rows, logits = [rows[place] for place in at], logits[at]
    own, settings_of = mx.array(logits), {**columns(rows), "uniform": mx.zeros((len(rows), 1))}
    left = filtered(own, kind[0], settings_of)
    whole = filtered(own, vocabulary, settings_of)
    decided = 0
    for place, row in enumerate(rows):
        try:
            keep = kept(logits[place], row)
        except Undecided:
            continue
        decided += 1
        assert np.array_equal(_kept(whole, place, vocabulary), keep)
        if left.complete is None or left.complete[place].item():
            assert np.array_equal(_kept(left, place, vocabulary), keep)
    assume(decided)


@pytest.mark.parametrize(
    ("row", "looks_at"),
    [
        (Sampling(), 0),
        (Sampling(min_p=0.1), 0),
        (Sampling(xtc_probability=0.5), 0),
        (Sampling(top_k=40, top_p=0.95), 64),
        (Sampling(top_k=65, typical_p=0.5), 128),
        (Sampling(top_p=0.95), 1024),
        (Sampling(min_p=0.1, xtc_probability=0.5), 1024),
        (Sampling(typical_p=0.5), 150_000),
    ],
    ids=str,
)
def test_only_the_best_tokens_are_sorted(
    row: Sampling, looks_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: True)
    assert reach(row, 150_000) == looks_at


def test_without_waiting_for_the_device_all_tokens_are_sorted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: False)
    assert reach(Sampling(top_p=0.95), 150_000) == 150_000
    assert reach(Sampling(top_k=40, top_p=0.95), 150_000) == 64


def test_a_row_that_needed_more_tokens_than_were_sorted_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: True)
    logits = np.zeros((3, 3000), dtype=np.float32)
    logits[0, 5] = 20.0
    rows = [Sampling(top_p=0.5), Sampling(top_p=0.5), Sampling(top_p=0.3)]
    left = filtered(mx.array(logits), reach(rows[0], 3000), columns(rows))
    assert left.complete is not None
    assert left.complete.tolist() == [True, False, True]
