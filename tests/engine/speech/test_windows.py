"""Windows of a recording: together they are all of it, and none is longer than allowed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.media.items import AUDIO_RATE
from backend.engine.speech.windows import windows
from tests.long import examples


@given(st.integers(0, 400_000), st.sampled_from([0.5, 1.0, 7.3]), st.integers(0, 2**31))
@settings(max_examples=examples(40), deadline=None)
def test_windows_follow_each_other_and_are_bounded(size: int, most: float, seed: int) -> None:
    samples = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    found = list(windows(samples, most))
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == size
    assert all(0 < end - start <= most * AUDIO_RATE for start, end in found if size)


def test_a_window_ends_in_a_pause() -> None:
    samples = np.ones(40 * AUDIO_RATE, np.float32)
    samples[25 * AUDIO_RATE : 26 * AUDIO_RATE] = 0.0
    (_, end), _ = windows(samples)
    assert 25 * AUDIO_RATE <= end <= 26 * AUDIO_RATE
