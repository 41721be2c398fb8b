"""An item on the wire: every encoding that hosts send, and a message for anything else."""

from __future__ import annotations

import base64
import binascii
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote_from_bytes, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.errors import InvalidRequest
from backend.engine.media import item_bytes as module
from backend.engine.media.decoding import decode
from backend.engine.media.item_bytes import item_bytes
from backend.engine.media.items import BadItem, Media
from backend.engine.media.limits import DEFAULT_COUNT, MediaLimits, media_limits
from backend.engine.settings import Settings
from backend.engine.units import MIB
from tests.engine.media import sound_corpus
from tests.engine.media.picture_corpus import noise, plain, save

# Bytes whose base64 has both of the digits that differ between the alphabets, and a JPEG whose
# base64 begins as a path does.
PNG = save(noise((9, 7)), "PNG")
JPEG = save(noise((9, 7)), "JPEG")
STANDARD = base64.b64encode(PNG).decode()
URL_SAFE = base64.urlsafe_b64encode(PNG).decode()
LIMITS = MediaLimits()
ROOT = Path(__file__).parents[3]


def test_the_samples_cover_the_cases_they_are_meant_for() -> None:
    assert {"+", "/"} <= set(STANDARD)
    assert base64.b64encode(JPEG).startswith(b"/9j/")


@pytest.mark.parametrize(
    "text",
    [
        STANDARD,
        URL_SAFE,
        STANDARD.rstrip("="),
        URL_SAFE.rstrip("=") + "==",
        base64.encodebytes(PNG).decode(),
        f"  \r\n{STANDARD}\t\n",
        f"data:image/png;base64,{STANDARD}",
        f"DATA:image/jpeg;name=a.jpg;BASE64,{URL_SAFE}",
        f"data:;base64,{STANDARD}",
        f" data:text/html;base64,{quote_from_bytes(STANDARD.encode(), safe='')}",
        "data:image/png," + quote_from_bytes(PNG),
    ],
    ids=range(11),
)
def test_every_encoding_gives_the_same_bytes(text: str) -> None:
    assert item_bytes(text, MIB, allow_paths=False) == PNG
    assert decode([text], [], LIMITS).images[0].width == 9


@given(
    content=st.binary(min_size=1, max_size=80),
    blanks=st.lists(st.integers(0, 120), max_size=5),
    size=st.integers(1, 9),
)
def test_any_chunking_gives_the_same_bytes(content: bytes, blanks: list[int], size: int) -> None:
    text = base64.b64encode(content).decode()
    for place in blanks:
        text = f"{text[:place]} \n{text[place:]}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLICE", size)
        assert module._of_base64(text, len(content)) == content


def test_a_large_item_is_never_decoded_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def noting(digits: str) -> bytes:
        sizes.append(len(digits))
        return binascii.a2b_base64(digits)

    content = PNG + bytes(8 * MIB)
    monkeypatch.setattr(module, "binascii", SimpleNamespace(a2b_base64=noting))
    assert item_bytes(base64.b64encode(content).decode(), 9 * MIB, allow_paths=False) == content
    assert max(sizes) < 2 * MIB


def test_mlx_is_not_imported() -> None:
    """Prompt threads decode, and only the engine thread may touch MLX."""
    code = "import sys, backend.engine.media.decoding; print('mlx.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout == b"False\n"


def test_a_bare_jpeg_is_not_a_path() -> None:
    text = base64.b64encode(JPEG).decode()
    assert item_bytes(text, MIB, allow_paths=True) == JPEG
    assert item_bytes(f"\n{text[:7]}\n{text[7:]}", MIB, allow_paths=True) == JPEG


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("data:image/png;base64,", "it has no data"),
        ("data:image/png", "without a comma"),
        ("data:,", "is not in a known image format"),
        ("https://example.com/cat.png", "URL of the scheme 'https', but this backend downloads"),
        ("FILE:///etc/passwd", "URL of the scheme 'file'"),
        ("s3://bucket/cat.png", "URL of the scheme 's3'"),
        ("/etc/passwd", "is a path or not base64"),
        ("/tmp/abcd", "is a path or not base64"),
        ("cat.png", "neither base64 nor a data URI: its character 4 is '.'"),
        ("../cat", "its character 1 is '.'"),
        ("QUJD*", "its character 5 is '*'"),
        ("QUJD=QUJD", "its character 5 is '='"),
        ("QUJDR", "5 digits are one too many"),
        ("é" * 9, "its character 1 is 'é'"),
        ("\ud800\x00", "neither base64"),
        ("QUJD", "is not in a known image format"),
    ],
)
def test_anything_else_is_refused_with_the_name_of_the_item(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode([STANDARD, STANDARD, text], [], LIMITS)
    assert str(caught.value).startswith("Images[2] ")
    assert says in str(caught.value)


def test_paths_are_accepted_if_the_load_allows_them(tmp_path: Path) -> None:
    file = tmp_path / "staged image.png"
    file.write_bytes(PNG)
    allowed = media_limits(Settings(allow_media_paths=True), 0, 0)
    assert decode([str(file)], [], allowed).images[0].width == 9
    with pytest.raises(InvalidRequest, match=r"Images\[0\] is a path or not base64") as caught:
        decode([str(file)], [], LIMITS)
    assert str(tmp_path) not in str(caught.value)


def test_only_regular_files_within_the_limit_are_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    large = tmp_path / "large.png"
    large.write_bytes(PNG + b"\x00" * MIB)
    refused = {
        str(tmp_path / "absent.png"): "not of a readable file",
        str(tmp_path): "not of a re",
        str(pipe): "not of a regular file",
        "/dev/zero": "not of a regular file",
        str(large): f"has {len(PNG) + MIB} bytes, but at most {MIB}",
        f"/{'a/' * 3000}": "not of a re",
        "/a\x00b": "not of a readable file",
    }
    limits = MediaLimits(allow_paths=True, item_bytes=MIB)
    for path, says in refused.items():
        with pytest.raises(InvalidRequest, match=says) as caught:
            decode([path], [], limits)
        assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("payload", ["%" * 100, "%zz" * 34, "%41" * 100, "é" * 50])
def test_no_data_uri_is_larger_than_the_load_allows(payload: str) -> None:
    size = len(unquote_to_bytes(payload))
    assert item_bytes(f"data:,{payload}", size, allow_paths=False) == unquote_to_bytes(payload)
    with pytest.raises(BadItem, match=f"has {size} bytes, but at most {size - 1} are allowed"):
        item_bytes(f"data:,{payload}", size - 1, allow_paths=False)


def test_no_item_is_larger_than_the_load_allows() -> None:
    limits = MediaLimits(item_bytes=len(PNG))
    assert decode([STANDARD], [], limits).images
    limits = MediaLimits(item_bytes=len(PNG) - 1)
    for text in (STANDARD, f"data:image/png,{quote_from_bytes(PNG)}"):
        with pytest.raises(InvalidRequest, match="larger max_media_mib"):
            decode([text], [], limits)


def test_items_come_in_order_and_are_counted() -> None:
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    images = [base64.b64encode(save(plain(colour=c), "PNG")).decode() for c in colours]
    wave = base64.b64encode(sound_corpus.save(sound_corpus.tone())).decode()
    limits = media_limits(Settings(), 3, 1)
    media = decode(images, [wave], limits)
    assert [picture.pixels.getpixel((0, 0)) for picture in media.images] == colours
    assert len(media.audios) == 1
    assert decode([], [], limits) == Media([], [], [])
    with pytest.raises(
        InvalidRequest,
        match=r"Images has 4 items.* larger limit_mm_per_prompt.image \(LimitImagePerPrompt",
    ):
        decode([*images, ""], [], limits)
    with pytest.raises(
        InvalidRequest, match=r"Audios has 2 items.* larger limit_mm_per_prompt.audio"
    ):
        decode([], [wave, wave], limits)
    with pytest.raises(InvalidRequest, match=r"Audios\[0\] is in the format PNG"):
        decode([], images[:1], limits)
    with pytest.raises(InvalidRequest, match=r"Images\[0\] is in the format WAV"):
        decode([wave], [], limits)


def test_a_whole_request_is_limited() -> None:
    image = base64.b64encode(save(plain(size=(100, 10)), "PNG")).decode()
    limits = MediaLimits(image_pixels=1000)
    assert len(decode([image] * 4, [], limits).images) == 4
    with pytest.raises(InvalidRequest, match=r"Images\[4\] .*may have 4000 in all, of which 0"):
        decode([image] * 5, [], limits)
    second = base64.b64encode(sound_corpus.save(sound_corpus.tone(seconds=1))).decode()
    assert len(decode([], [second] * 2, MediaLimits(audio_seconds=2)).audios) == 2
    with pytest.raises(InvalidRequest, match=r"Audios\[2\] .*may have 2 together"):
        decode([], [second] * 3, MediaLimits(audio_seconds=2))


def test_limits_come_from_the_load() -> None:
    settings = Settings(max_image_pixels=7, max_audio_seconds=8, max_media_mib=9)
    limits = media_limits(settings, 1, 0)
    assert (limits.images, limits.audios) == (1, DEFAULT_COUNT)
    assert (limits.image_pixels, limits.audio_seconds, limits.item_bytes) == (7, 8, 9 * MIB)
    assert media_limits(Settings(), 0, 0) == MediaLimits()
    with pytest.raises(InvalidRequest, match="LimitAudioPerPrompt is -1"):
        media_limits(settings, 1, -1)
