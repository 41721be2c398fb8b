"""Sounds of every kind that arrives: good, odd, broken and hostile, each made here.

A good one is a tone of 440 Hz, half a second long unless it says otherwise.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import av
import numpy as np
import soundfile

from backend.engine.media.audio_process import DEMUXERS
from tests.engine.media.clips import plain, saved

RATE = 16_000
TONE = 440.0
LEVEL = 0.5


@dataclass(frozen=True)
class GoodSound:
    name: str
    content: bytes
    seconds: float = 0.5
    level: float = LEVEL


@dataclass(frozen=True)
class BadSound:
    name: str
    content: bytes
    says: str


def tone(rate: int = RATE, seconds: float = 0.5, channels: int = 1) -> Any:
    """Samples of shape (n, channels)."""
    times = np.arange(int(rate * seconds)) / rate
    wave = LEVEL * np.sin(2 * np.pi * TONE * times)
    return np.repeat(wave[:, None].astype(np.float32), channels, axis=1)


def save(samples: Any, rate: int = RATE, kind: str = "WAV", subtype: str | None = None) -> bytes:
    file = BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def encoded(samples: Any, rate: int, name: str, codec: str) -> bytes:
    """The file that FFmpeg writes for these samples. name: its ending is the format."""
    file = BytesIO()
    file.name = name
    with av.open(file, "w") as container:
        stream = container.add_stream(codec, rate)
        assert isinstance(stream, av.AudioStream)
        stream.layout = "stereo" if samples.shape[1] == 2 else "mono"
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(samples.T), "fltp", stream.layout.name
        )
        frame.sample_rate = rate
        fifo = av.AudioFifo()
        fifo.write(frame)
        resampler = av.AudioResampler(stream.codec_context.format, stream.layout, rate)
        while part := fifo.read(1024, partial=True):
            for each in resampler.resample(part):
                container.mux(stream.encode(each))
        container.mux(stream.encode(None))
    return file.getvalue()


def wav(samples: bytes, channels: int = 1, rate: int = RATE, bits: int = 32, tag: int = 3) -> bytes:
    """A hand-made WAV, of floats by default."""
    size = channels * bits // 8
    form = struct.pack(
        "<HHIIHH", tag, channels, rate, rate * size & 0xFFFFFFFF, size & 0xFFFF, bits
    )
    body = b"WAVEfmt " + struct.pack("<I", 16) + form
    body += b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _floats(*values: float) -> bytes:
    return np.array(values * 100, np.float32).tobytes()


def _cases() -> Iterator[GoodSound]:
    for subtype in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW"):
        yield GoodSound(f"WAV {subtype}", save(tone(), subtype=subtype))
    for rate in (8000, 11025, 22050, 44100, 48000, 192_000):
        yield GoodSound(f"{rate} Hz", save(tone(rate), rate))
    for channels in (2, 6, 8):
        yield GoodSound(f"{channels} channels", save(tone(channels=channels)))
    one_side = tone(channels=2)
    one_side[:, 1] = 0
    yield GoodSound("one side", save(one_side), level=LEVEL / 2)
    yield GoodSound("FLAC", save(tone(44100), 44100, "FLAC"))
    yield GoodSound("FLAC of 24 bits", save(tone(), kind="FLAC", subtype="PCM_24"))
    yield GoodSound("Vorbis", save(tone(44100, channels=2), 44100, "OGG", "VORBIS"))
    yield GoodSound("Opus", save(tone(48000), 48000, "OGG", "OPUS"))
    yield GoodSound("MP3", save(tone(44100, channels=2), 44100, "MP3"))
    yield GoodSound("AIFF", save(tone(), kind="AIFF"))
    for name, codec in (
        ("a.m4a", "aac"),
        ("a.m4a", "alac"),
        ("a.mp4", "aac"),
        ("a.mov", "pcm_s16le"),
        ("a.webm", "libopus"),
        ("a.mka", "libmp3lame"),
        ("a.aac", "aac"),
    ):
        yield GoodSound(f"{codec} in {name}", encoded(tone(48000, channels=2), 48000, name, codec))
    yield GoodSound("ALAC of 8 kHz", encoded(tone(8000), 8000, "a.m4a", "alac"))
    yield GoodSound("RF64", save(tone(), kind="RF64"))
    endless = bytearray(save(tone()))
    endless[4:8] = endless[40:44] = b"\xff\xff\xff\xff"
    yield GoodSound("WAV from a pipe", bytes(endless))
    yield GoodSound("WAV cut off", save(tone(seconds=1))[: 44 + RATE], seconds=0.5)


def _refused() -> Iterator[BadSound]:
    other = {
        "M4A": b"\x00\x00\x00\x20ftypM4A \x00\x00\x00\x00",
        "MP4": b"\x00\x00\x00\x20ftypmp42\x00\x00\x00\x00",
        "AAC": b"\xff\xf1\x50\x80\x02\x1f\xfc",
        "AAC ": b"ADIF\x00\x00",
        "WebM or Matroska": b"\x1aE\xdf\xa3\x9fB\x86\x81\x01",
        "AMR": b"#!AMR\n",
        "WMA": b"0&\xb2u\x8ef\xcf\x11\xa6\xd9",
        "CAF": b"caff\x00\x01",
        "AVI": b"RIFF\x24\x00\x00\x00AVI LIST",
        "PNG": b"\x89PNG\r\n\x1a\n",
        "PDF": b"%PDF-1.4",
    }
    for name, content in other.items():
        apart = name.strip() in DEMUXERS
        why = (
            "cannot be decoded"
            if apart
            else f"is in the format {name}, which this backend does not decode"
        )
        yield BadSound(name, content, why)
    for name, content in {"text": b"hello", "zeros": b"\x00" * 99, "MIDI": b"MThd\x00\x00"}.items():
        yield BadSound(name, content, "is not in a known audio format")
    for kind in ("WAV", "FLAC", "OGG"):
        yield BadSound(f"head of a {kind}", save(tone(), kind=kind)[:24], "cannot be decoded")
    yield BadSound(
        "MP3 of no frame", b"ID3\x04\x00\x00\x00\x00\x00\x00" + b"\x00" * 99, "cannot be"
    )
    yield BadSound("half a FLAC", (whole := save(tone(), kind="FLAC"))[: len(whole) // 2], "FLAC")
    yield BadSound("no sample", save(tone()[:0]), "without any samples")
    yield BadSound("one of 44,100 samples", save(tone(44100)[:1], 44100), "is too short")
    for name, value in {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}.items():
        yield BadSound(name, wav(_floats(0.0, value)), "not finite numbers")
    yield BadSound("sums beyond floats", wav(_floats(3e38), channels=2), "not finite|too large")
    yield BadSound("9 channels", save(tone(channels=9)), "has 9 channels, but at most 8")
    yield BadSound("60000 channels", wav(b"\x00" * 240_000, channels=60_000), "channels|cannot be")
    yield BadSound("slow", wav(_floats(0.0), rate=3999), "has 3999 samples per second")
    yield BadSound("fast", wav(_floats(0.0), rate=4_000_000), "has 4000000 samples per second")
    yield BadSound("no rate", wav(_floats(0.0), rate=0), "samples per second|cannot be")
    yield BadSound("an unknown codec", wav(_floats(0.0), tag=0x1234), "cannot be decoded")
    silent = saved(plain([(255, 0, 0)] * 8))
    yield BadSound("a video without audio", silent, "is MP4 audio that cannot be .* no audio")
    hour = save(np.zeros(3600 * 4000, np.int16), 4000, "FLAC")
    yield BadSound("an hour of silence", hour, "is longer than 600 seconds")


GOOD: tuple[GoodSound, ...] = tuple(_cases())
BAD: tuple[BadSound, ...] = tuple(_refused())
