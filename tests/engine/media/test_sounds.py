"""Every sound of the corpus becomes 16 kHz mono, or a message that says why not."""

from __future__ import annotations

import gc
import re
import tracemalloc

import numpy as np
import pytest

from backend.engine.media.audio import decode_audio
from backend.engine.media.items import BadItem, DecodedAudio
from backend.engine.media.limits import MediaLimits
from backend.engine.units import MIB
from tests.engine.media.sound_corpus import BAD, GOOD, LEVEL, TONE, BadSound, GoodSound, save, tone

MOST = MediaLimits().audio_seconds


def read(content: bytes) -> DecodedAudio:
    return decode_audio(content, MOST, MOST)


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_a_good_sound_keeps_its_length_its_tone_and_its_level(case: GoodSound) -> None:
    sound = read(case.content)
    assert (sound.rate, sound.samples.dtype, sound.samples.ndim) == (16_000, np.float32, 1)
    assert len(sound.samples) / sound.rate == pytest.approx(case.seconds, abs=0.08)
    middle = sound.samples[1600:6400]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert np.argmax(spectrum) * sound.rate / len(middle) == pytest.approx(TONE, abs=5)
    assert np.abs(middle).max() == pytest.approx(case.level, rel=0.06)


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000, 192_000])
def test_another_rate_has_the_same_wave(rate: int) -> None:
    samples = read(save(tone(rate, 2), rate, subtype="FLOAT")).samples
    assert len(samples) == 32_000
    wave = LEVEL * np.sin(2 * np.pi * TONE * np.arange(32_000) / 16_000)
    inner = slice(800, -800)  # a resampler knows nothing beyond the ends
    assert np.abs(samples - wave)[inner].max() < 1e-4


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_a_bad_sound_is_refused_with_its_reason(
    case: BadSound, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadItem, match=case.says) as caught:
        read(case.content)
    assert re.fullmatch(r"(is|has) .+", str(caught.value))
    assert not re.search(r"0x[0-9a-f]{6}|Traceback|\n", str(caught.value))
    assert capfd.readouterr().err == ""


def test_a_limit_may_be_reached_and_not_exceeded() -> None:
    second = save(tone(seconds=1))
    assert len(decode_audio(second, 1, 1).samples) == 16_000
    with pytest.raises(BadItem, match=r"is longer than 0\.95 seconds.* may have 1 together"):
        decode_audio(second, 0.95, 1)


def test_a_damaged_frame_does_not_end_an_mp3() -> None:
    content = bytearray(save(tone(seconds=10), kind="MP3"))
    for place in range(len(content) // 4, len(content), 97):
        content[place] ^= 0x55
    assert len(read(bytes(content)).samples) > 9 * 16_000


def test_a_small_file_takes_the_memory_of_its_seconds_at_16_khz() -> None:
    """Two minutes at 96 kHz are 44 MiB of samples before they are resampled."""
    content = save(np.zeros((120 * 96_000, 1), np.int16), 96_000, "FLAC")
    gc.collect()
    tracemalloc.start()
    samples = read(content).samples
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(samples) == 120 * 16_000
    assert peak < 24 * MIB


def test_the_digest_is_of_the_samples_and_not_of_the_file() -> None:
    wave = (tone() * 32_767).astype(np.int16)
    same = [save(wave, kind=kind) for kind in ("WAV", "FLAC", "RF64")]
    assert len({read(content).digest for content in same}) == 1
    assert read(save(-wave)).digest != read(save(wave)).digest
