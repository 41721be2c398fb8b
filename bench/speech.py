"""Transcription by the backend, against mlx-audio in this process.

The checkpoint is a Whisper with random weights, as wide as the smallest one. Random text is so
improbable that both sides decode it at every temperature.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import soundfile

from backend.engine.media.items import AUDIO_RATE
from bench.pairs import at_least_in_pairs
from bench.process import backend
from bench.report import Figure
from tests.engine.speech import tiny_speech
from tests.engine.speech.conftest import opened
from wire import backend_pb2 as pb

WIDTH = 384
AUDIO_SECONDS = 25.0
PAIRS = 5
SECONDS = 60.0  # the maximum time of all pairs


def measure() -> Iterator[Figure]:
    with TemporaryDirectory() as folder:
        with patch.object(tiny_speech, "SIZE", WIDTH):
            path = tiny_speech.write_whisper(Path(folder, "whisper"))
        reference = opened(path)
        samples = tiny_speech.speech(AUDIO_SECONDS)
        recording = Path(folder, "recording.wav")
        soundfile.write(recording, samples, AUDIO_RATE)
        with backend(path) as stub:
            request = pb.TranscriptRequest(dst=str(recording), language="en")

            def ours(_: int) -> float:
                return _speed(partial(stub.AudioTranscription, request))

            def theirs(_: int) -> float:
                return _speed(partial(reference.generate, samples, language="en", fp16=False))

            yield at_least_in_pairs(
                "seconds of speech per second / mlx-audio",
                0.95,
                ours,
                theirs,
                pairs=PAIRS,
                seconds=SECONDS,
            )


def _speed(transcribe: Callable[[], object]) -> float:
    started = time.perf_counter()
    transcribe()
    return AUDIO_SECONDS / (time.perf_counter() - started)
