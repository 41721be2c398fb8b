"""Any bytes give a refusal or a picture, and the memory is released."""

from __future__ import annotations

import base64
import gc
import random
from collections.abc import Callable

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.errors import InvalidRequest
from backend.engine.media.decoding import decode
from backend.engine.media.kinds import kind_of
from backend.engine.media.limits import MediaLimits
from backend.engine.units import MIB
from tests.engine.media import picture_corpus, sound_corpus
from tests.long import TEST_LONG

pytestmark = pytest.mark.filterwarnings(r"ignore::UserWarning:PIL\..*")
LIMITS = MediaLimits(image_pixels=1 << 20, audio_seconds=30)
PICTURES = [case.content for case in picture_corpus.GOOD if len(case.content) < 20_000]
SOUNDS = [sound_corpus.save(sound_corpus.tone(seconds=0.02), kind=k) for k in ("WAV", "FLAC")]
SOUNDS += [
    sound_corpus.save(sound_corpus.tone(44100, 0.1), 44100, "MP3"),
    sound_corpus.save(sound_corpus.tone(44100, 0.1), 44100, "OGG", "VORBIS"),
    sound_corpus.save(sound_corpus.tone(48000, 0.1), 48000, "OGG", "OPUS"),
]


def as_picture(content: bytes) -> None:
    decode([base64.b64encode(content).decode()], [], LIMITS)


def as_sound(content: bytes) -> None:
    decode([], [base64.b64encode(content).decode()], LIMITS)


def only_refused(read: Callable[[bytes], None], content: bytes) -> None:
    sentence = "Images[0] is a picture"
    try:
        read(content)
    except InvalidRequest as refusal:
        sentence = str(refusal)
    assert sentence.startswith(("Images[0] ", "Audios[0] "))
    assert len(sentence) < 300


def damage(content: bytes, seed: int) -> bytes:
    """Apply one to eight of these: flip bits, or cut out, double or overwrite a range."""
    rng = random.Random(seed)
    data = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 30))
        match rng.randrange(4):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length]
            case _:
                data[at : at + length] = rng.choice((b"\xff", b"\x00", b"\x7f")) * length
    return bytes(data)


@given(
    st.text(max_size=60) | st.from_regex(r"(data:[a-z/;,%]*)?[A-Za-z0-9+/=_\-]*", fullmatch=True)
)
def test_any_text_is_decoded_or_refused(text: str) -> None:
    for images, audios in (([text], []), ([], [text])):
        with pytest.raises(InvalidRequest):
            decode(images, audios, LIMITS)


@given(
    st.sampled_from([*(content[:16] for content in PICTURES + SOUNDS), b"\x00\x00\x00\x20ftyp"]),
    st.integers(0, 16),
    st.binary(max_size=200),
)
def test_any_bytes_behind_a_known_signature_are_decoded_or_refused(
    start: bytes, kept: int, rest: bytes
) -> None:
    kind_of(start[:kept] + rest)
    only_refused(as_picture, start[:kept] + rest)
    only_refused(as_sound, start[:kept] + rest)


@settings(max_examples=400 if TEST_LONG else 100)
@given(st.sampled_from(PICTURES), st.integers(0, 1 << 32))
def test_any_damaged_picture_is_decoded_or_refused(content: bytes, seed: int) -> None:
    only_refused(as_picture, damage(content, seed))


@settings(max_examples=120 if TEST_LONG else 40)
@given(st.sampled_from(SOUNDS), st.integers(0, 1 << 32))
def test_any_damaged_sound_is_decoded_or_refused(content: bytes, seed: int) -> None:
    only_refused(as_sound, damage(content, seed))


def test_memory_use_returns_to_its_start() -> None:
    bad = [(as_picture, case.content) for case in picture_corpus.BAD]
    bad += [(as_sound, case.content) for case in sound_corpus.BAD]
    good = picture_corpus.save(picture_corpus.noise((1000, 1000)), "PNG")

    def once() -> int:
        for read, content in bad:
            with pytest.raises(InvalidRequest):
                read(content)
        as_picture(good)
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    once()
    begin = once()
    for _ in range(3):
        end = once()
    assert end - begin < 24 * MIB
