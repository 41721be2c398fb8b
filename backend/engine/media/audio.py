"""Decodes an audio file to samples: one channel, 16 kHz, float32, within limits.

The container is recognised by its bytes. Samples are read in blocks, mixed and resampled
immediately, so hours of silence in a small file cost no more than the allowed seconds at 16 kHz.
"""

from __future__ import annotations

import hashlib
import time
from io import BytesIO
from typing import Any

import numpy as np

from backend.engine.media.audio_process import DEMUXERS
from backend.engine.media.child import answer_of
from backend.engine.media.items import AUDIO_RATE, BadItem, DecodedAudio, require_form
from backend.engine.media.kinds import require_format
from backend.engine.media.limits import AUDIO_CPU_SECONDS, AUDIO_MEMORY
from backend.engine.units import MIB

_HERE = ("WAV", "FLAC", "OGG", "MP3", "AIFF")  # libsndfile decodes these in this process
FORMATS = tuple(dict.fromkeys((*_HERE, *DEMUXERS)))
_BLOCK = 1 << 16
_PROGRAM = "backend.engine.media.audio_process"
_SLOW = f"takes more than {AUDIO_CPU_SECONDS} seconds to decode: send a part of the audio"
_LARGE = f"takes more than {AUDIO_MEMORY // MIB} MiB of memory to decode: send the audio as MP3"


def decode_audio(content: bytes, most: float, allowed: int) -> DecodedAudio:
    """Decode the audio in a file.

    most: seconds that this request may still use.
    allowed: maximum seconds of all audio of a request together; 0 if there is only one item.

    Raises BadItem.
    """
    name = require_format(content, "audio", FORMATS)
    samples = (_read if name in _HERE else _read_in_child)(content, name, most, allowed)
    if not len(samples):
        raise BadItem(f"is too short: it has no sample at {AUDIO_RATE} per second")
    if not np.isfinite(samples).all():
        raise BadItem(
            "has samples that are not finite numbers or are too large to be mixed: save it with"
            " 16-bit samples"
        )
    digest = hashlib.sha256(f"{AUDIO_RATE}:".encode())
    digest.update(samples)
    return DecodedAudio(samples, AUDIO_RATE, digest.digest())


class _File(BytesIO):
    """A file for libsndfile that accepts seeks before its beginning, which broken files cause.

    An exception in libsndfile's callbacks would be printed on stderr and not raised.
    """

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return super().seek(0, 2)


def _read(content: bytes, name: str, most: float, allowed: int) -> Any:
    """Return the samples: all channels mixed to one, at AUDIO_RATE."""
    import soundfile
    import soxr

    samples, found = bytearray(), 0
    began = time.thread_time()
    try:
        with soundfile.SoundFile(_File(content)) as file:
            rate: int = file.samplerate
            declared: int = file.frames
            require_form(file.channels, rate)
            stream = soxr.ResampleStream(rate, AUDIO_RATE, 1, "float32")
            while True:
                block = file.read(_BLOCK, dtype="float32", always_2d=True)
                found += len(block)
                if found > most * rate:
                    raise _too_long(most, allowed)
                if time.thread_time() - began > AUDIO_CPU_SECONDS:
                    raise BadItem(_SLOW)
                with np.errstate(over="ignore", invalid="ignore"):
                    mixed = block.mean(axis=1, dtype=np.float32)
                if rate != AUDIO_RATE:
                    mixed = stream.resample_chunk(mixed, last=not len(block))
                samples += mixed.data
                if not len(block):
                    break
    except BadItem:
        raise
    except Exception as fault:
        raise BadItem(f"is {name} audio that cannot be decoded: {_why(fault)}") from None
    if not found:
        raise BadItem(f"is {name} audio without any samples: send a recording that is not empty")
    if name == "MP3" and found < declared:  # libsndfile stops at a damaged frame
        return _read_in_child(content, name, most, allowed)
    if name == "FLAC" and found < declared:
        raise BadItem(
            f"is truncated FLAC audio: it has {found} of {declared} samples; send the complete file"
        )
    return np.frombuffer(samples, np.float32)


def _read_in_child(content: bytes, name: str, most: float, allowed: int) -> Any:
    """Return the same as `_read` for a file that FFmpeg decodes, in a child process."""
    task, wall = {"kind": name, "seconds": most}, 2 * AUDIO_CPU_SECONDS
    try:
        answer, samples = answer_of(_PROGRAM, task, content, wall, "audio", _SLOW, _LARGE)
    except BadItem as bad:
        broken = str(bad).startswith("cannot")
        raise BadItem(f"is {name} audio that {bad}") if broken else bad from None
    rate: int = answer["rate"]
    mixed = np.frombuffer(samples, np.float32)
    if not len(mixed):
        raise BadItem(f"is {name} audio without any samples: send a recording that is not empty")
    if len(mixed) > most * rate:
        raise _too_long(most, allowed)
    return resampled(mixed, rate)


def _too_long(most: float, allowed: int) -> BadItem:
    if not allowed:
        return BadItem(f"is longer than {most:g} seconds: divide it into several recordings")
    return BadItem(
        f"is longer than {most:g} seconds, but the audio of a request may have {allowed} together:"
        " send less, or load the model with a larger max_audio_seconds"
    )


def resampled(mixed: Any, rate: int, target_rate: int = AUDIO_RATE) -> Any:
    """Return samples of one channel at another rate, in float32."""
    if rate == target_rate:
        return mixed
    import soxr

    return soxr.resample(mixed, rate, target_rate)


def _why(fault: Exception) -> str:
    """Return libsndfile's reason, without the file object that soundfile writes before it."""
    text = " ".join(str(getattr(fault, "error_string", "") or "").split()).rstrip(".")
    return text if 0 < len(text) < 120 else "its data is broken"
