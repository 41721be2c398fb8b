"""Divides a recording into windows that a model transcribes one by one, at its quietest points."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from backend.engine.media.items import AUDIO_RATE

MOST_SECONDS = 30
_SEARCHED_SECONDS = 10  # at the end of a window: where the quietest point is looked for
_FRAME = AUDIO_RATE // 50


def windows(samples: np.ndarray, most_seconds: float = MOST_SECONDS) -> Iterator[tuple[int, int]]:
    """Yield the first sample of each window and the one after its last; together they are all.

    A window ends in the middle of the quietest 20 ms of its last third, so that no word is cut if
    the speaker pauses.
    """
    most = int(most_seconds * AUDIO_RATE)
    searched = min(_SEARCHED_SECONDS * AUDIO_RATE, most // 3)
    start = 0
    while len(samples) - start > most:
        tail = samples[start + most - searched : start + most]
        frames = tail[: len(tail) // _FRAME * _FRAME].reshape(-1, _FRAME)
        energy = np.square(frames, dtype=np.float64).mean(axis=1)
        quietest = int(energy.argmin()) if len(energy) else 0
        end = start + most - searched + quietest * _FRAME + _FRAME // 2
        yield start, end
        start = end
    yield start, len(samples)
