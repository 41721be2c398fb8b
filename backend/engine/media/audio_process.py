"""The program that decodes the audio of one file, run as a child process; see `audio`.

It decodes formats that libsndfile does not: recordings of telephones and browsers, and the audio of
videos. Standard input is the file; the first argument is a JSON object with the file's kind and the
maximum length. The program writes one line of JSON, with `refusal` or the sample rate, followed by
float32 samples of one channel.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from backend.engine.media.items import AUDIO_RATE, BadItem, require_form
from backend.engine.media.limits import AUDIO_CPU_SECONDS, AUDIO_MEMORY
from backend.engine.media.video_process import BROKEN, opened, write_answer
from common.bounded_process import limit_own_process

DEMUXERS = {
    "M4A": "mov",
    "MP4": "mov",
    "QuickTime": "mov",
    "WebM or Matroska": "matroska",
    "AAC": "aac",
    "AMR": "amr",
    "WMA": "asf",
    "MP3": "mp3",
}
_CODECS = (
    "aac", "alac", "mp3float", "opus", "vorbis", "flac", "amrnb", "amrwb", "wmav2", "pcm_s16le",
)  # fmt: skip


def main() -> None:
    task = json.loads(sys.argv[1])
    import av.audio.resampler  # noqa: F401 # before the limit, which is for the file's memory alone
    import numpy as np  # noqa: F401

    limit_own_process(AUDIO_CPU_SECONDS, AUDIO_MEMORY)
    write_answer(lambda: _decoded(task["kind"], task["seconds"]))


def _decoded(kind: str, seconds: float) -> tuple[dict[str, Any], Iterator[bytes]]:
    """Return the rate, and the samples.

    kind: a key of `DEMUXERS`.
    seconds: maximum length. If the audio is longer, one more sample is returned.
    """
    file, stream = opened("audio", DEMUXERS[kind], _CODECS, "AAC, Opus, MP3 or FLAC")
    codec = stream.codec_context
    require_form(codec.channels, codec.sample_rate)
    # At most the rate that models need, because hours of samples are in memory at the same time.
    rate = min(int(codec.sample_rate), AUDIO_RATE)
    parts = _parts(file, stream, rate)
    first = next(parts, None)
    if first is None:
        raise BadItem(BROKEN)
    return {"rate": rate}, _within(chain([first], parts), int(seconds * rate) + 1)


def _parts(file: Any, stream: Any, rate: int) -> Iterator[Any]:
    """Yield the samples of all undamaged frames, mixed to one channel."""
    import av
    import numpy as np
    from av.audio.resampler import AudioResampler

    resampler = AudioResampler(format="fltp", rate=rate)
    for packet in file.demux(stream):
        with suppress(av.FFmpegError):  # a damaged packet; the next packets may be intact
            for frame in packet.decode():
                for part in resampler.resample(frame):
                    yield part.to_ndarray().mean(axis=0, dtype=np.float32)
    for part in resampler.resample(None):
        yield part.to_ndarray().mean(axis=0, dtype=np.float32)


def _within(parts: Iterator[Any], left: int) -> Iterator[bytes]:
    for part in parts:
        yield part[:left].tobytes()
        left -= len(part)
        if left <= 0:
            return


if __name__ == "__main__":
    main()
