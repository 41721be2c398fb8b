"""Which frames of a clip are decoded, at what size, how exactly; and the errors for bad clips."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.errors import EngineFailed, InvalidRequest
from backend.engine.media.decoding import decode
from backend.engine.media.items import BadItem, Video
from backend.engine.media.limits import MediaLimits
from backend.engine.media.video import decode_video
from common import bounded_process
from tests.engine.media.clips import (
    BLUE,
    GREEN,
    H264,
    RED,
    Colour,
    held,
    in_base64,
    lasting,
    plain,
    saved,
    saved_as_gif,
)
from tests.engine.media.test_hostile import damage
from tests.long import TEST_LONG

LIMITS = MediaLimits()
FRAMES = plain([RED] * 12 + [BLUE] * 8)
CLIP = saved(FRAMES)
WEBM = saved(FRAMES, "clip.webm", "libvpx")
DURATION = b"\x44\x89\x88"  # the element, whose number has eight bytes
CLOSE = 12  # of 256: the deviation that a codec causes in a plain colour


def read(content: bytes, **limits: Any) -> Video:
    bounds = MediaLimits(**limits)
    return decode_video(content, bounds.image_pixels, bounds)


def colours(frames: Video) -> list[Colour]:
    means = [np.asarray(frame.pixels).reshape(-1, 3).mean(axis=0) for frame in frames.frames]
    known = (RED, GREEN, BLUE)
    nearest = [min(known, key=lambda one: np.abs(mean - one).max()) for mean in means]
    for mean, colour in zip(means, nearest, strict=True):
        assert np.abs(mean - colour).max() < CLOSE
    return nearest


def even(count: int, taken: int) -> Sequence[int]:
    return tuple(np.linspace(0, count - 1, taken).round().astype(int).tolist())


@pytest.mark.parametrize(
    "make",
    [
        lambda: CLIP,
        lambda: saved(FRAMES, "clip.mov"),
        lambda: saved(FRAMES, "clip.mkv"),
        lambda: WEBM,
        lambda: saved(FRAMES, "clip.webm", "libvpx-vp9"),
        lambda: saved(FRAMES, "clip.avi", "mjpeg"),
        lambda: saved_as_gif(plain([RED, GREEN] * 10)),
    ],
    ids=["mp4", "mov", "mkv", "vp8", "vp9", "avi", "gif"],
)
def test_frames_are_taken_at_even_distances(make: Callable[[], bytes]) -> None:
    content = make()
    seen = read(content)
    # A GIF stores times in hundredths of a second.
    assert seen.count == 20
    assert seen.rate == pytest.approx(8, rel=0.05)
    assert tuple(seen.indices) == even(20, 16)
    gif = content.startswith(b"GIF")
    of_place = [(RED, GREEN)[at % 2] if gif else RED if at < 12 else BLUE for at in seen.indices]
    assert colours(seen) == of_place
    assert {(frame.width, frame.height) for frame in seen.frames} == {(64, 64)}


def test_h264_is_decoded() -> None:
    frames = [np.asarray(frame.pixels) for frame in read(H264, video_frames=4).frames]
    assert [int(frame.mean(axis=(0, 1)).argmax()) for frame in frames] == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("clip.mp4", "libx264", {"bf": "3", "g": "30"}),
        ("clip.mkv", "libx265", {}),
        ("clip.avi", "mpeg4", {"bf": "2", "qmax": "2"}),
        # packets in AVI have no times of frames if their order is not that of the frames
        ("clip.avi", "libx264", {"bf": "3"}),
        # packets of frames that are never shown
        ("clip.webm", "libvpx", {"auto-alt-ref": "1", "lag-in-frames": "16"}),
        ("clip.webm", "libvpx-vp9", {"g": "30"}),
    ],
)
@pytest.mark.parametrize("taken", [7, 100])
def test_each_place_has_the_frame_that_is_shown_there(
    name: str, codec: str, options: Mapping[str, Any], taken: int
) -> None:
    shades = [20 + 2 * at for at in range(100)]
    content = saved(plain([(shade,) * 3 for shade in shades]), name, codec, 24, **options)
    seen = read(content, video_frames=taken)
    assert (seen.count, tuple(seen.indices)) == (100, even(100, taken))
    assert seen.rate == pytest.approx(24, rel=0.001)
    for place, frame in zip(seen.indices, seen.frames, strict=True):
        assert np.asarray(frame.pixels).mean() == pytest.approx(shades[place], abs=1)


@pytest.mark.parametrize("turned", [90, 180, 270])
def test_a_clip_is_turned_as_a_player_turns_it(turned: int) -> None:
    left = np.hstack(plain([RED, BLUE], (32, 32)))
    (frame,) = read(saved([left], turned=turned)).frames
    pixels = np.asarray(frame.pixels)
    known = np.rot90(left, turned // 90)
    assert pixels.shape == known.shape
    assert np.abs(pixels.astype(int) - known).mean() < CLOSE


def test_a_clip_may_have_a_title_that_is_not_utf8() -> None:
    assert b"Lavf" in CLIP
    assert read(CLIP.replace(b"Lavf", b"L\xe4vf")).count == 20


def test_the_frames_of_a_clip_without_a_stated_length_are_counted() -> None:
    content = bytearray(WEBM)
    at = content.index(DURATION)
    content[at : at + 2] = b"\xec\x89"  # the element Void, which readers skip
    seen = read(bytes(content), video_frames=5)
    assert (seen.count, tuple(seen.indices)) == (20, even(20, 5))
    assert seen.rate == pytest.approx(8, rel=0.02)


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 1e9, 1e300, float("inf"), float("nan")])
def test_an_impossible_length_is_replaced_by_a_count_or_refused(seconds: float) -> None:
    content = bytearray(WEBM)
    at = content.index(DURATION) + len(DURATION)
    struct.pack_into(">d", content, at, seconds * 1000)
    try:
        assert read(bytes(content)).count == 20
    except BadItem as bad:
        sentence = str(bad)
        assert seconds > 1
        assert sentence.startswith(("lasts longer than 3600 seconds", "is truncated", "cannot be"))


def test_a_single_frame_is_a_video_too() -> None:
    assert read(saved(FRAMES[:1])).indices == (0,)
    assert read(CLIP, video_frames=1).indices == (0,)


def test_frames_are_scaled_down_to_their_share_of_the_pixels() -> None:
    seen = decode_video(saved(plain([RED] * 8, (200, 100))), 8 * 60 * 30, LIMITS)
    assert {(frame.width, frame.height) for frame in seen.frames} == {(60, 30)}
    assert colours(seen) == [RED] * 8


def test_a_digest_covers_frames_and_times() -> None:
    again, slower = read(CLIP), read(saved(FRAMES, rate=4))
    assert again.digest == read(saved(FRAMES)).digest
    assert again.frames[0].digest == slower.frames[0].digest
    others = [read(CLIP, video_frames=15), read(saved(FRAMES[::-1])), slower]
    assert len({again.digest, *(one.digest for one in others)}) == 4


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: b"", "is not in a known video format: send MP4, "),
        (lambda: b"Once upon a time there was a text.", "is not in a known video format"),
        (lambda: saved_as_gif(plain([RED, BLUE]))[:20], "cannot be decoded"),
        (lambda: CLIP[:-400], "cannot be decoded: it is broken or cut off"),
        (lambda: WEBM[:-300], r"is truncated: it has \d+ of 20 frames"),
        (lambda: H264[:8] + b"\0" * 4000, "cannot be decoded"),
        (lambda: b"\x1aE\xdf\xa3" + b"\xff" * 4000, "cannot be decoded"),
        (
            lambda: saved(plain([RED], (16400, 64)), "clip.avi", "mjpeg"),
            "a side may have at most 16384",
        ),
        (lambda: saved(plain([RED], (8000, 32)), "clip.avi", "mjpeg"), "200 times the other"),
        (
            lambda: saved(plain([RED], (7000, 5000)), "clip.avi", "mjpeg"),
            "a frame may have 33554432 in all",
        ),
        (lambda: lasting(CLIP, 36_000), "lasts longer than 3600 seconds"),
        (
            lambda: saved(FRAMES, "clip.avi", "huffyuv"),
            "has the codec huffyuv, which this backend does not decode: send H.264",
        ),
        (lambda: b"\x89PNG\r\n\x1a\n", "is in the format PNG, which this backend does not decode"),
    ],
)
def test_an_invalid_clip_is_refused_with_its_reason(make: Callable[[], bytes], says: str) -> None:
    content = make()
    with pytest.raises(BadItem, match=says) as caught:
        read(content)
    assert re.fullmatch(r"(is|has|lasts|cannot) .+", str(caught.value))
    assert not re.search(r"0x[0-9a-f]{6}|Traceback|/|\n", str(caught.value).replace("H.264", ""))


@cache
def heavy() -> bytes:
    return held(saved(plain([RED] * 2, (3840, 2160))), 1500)


def test_a_clip_that_takes_too_long_ends_only_its_decoder_process() -> None:
    with pytest.raises(BadItem, match="takes too long to decode: the videos of a request may"):
        decode_video(heavy(), LIMITS.image_pixels, LIMITS, 0.1)


def test_the_videos_of_a_request_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.engine.media.decoding.VIDEO_CPU_SECONDS", 3)
    with pytest.raises(InvalidRequest, match=r"Videos\[\d\] takes too long to decode"):
        decode([], [], LIMITS, [in_base64(heavy())] * 8)


def with_child(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """The child is a fresh process, so what it should do differently is a line of its program."""
    names = "from backend.engine.media import video_process"
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **rest: real(
            [command[0], "-c", f"{names}; {change}; video_process.main()", command[-1]], **rest
        ),
    )


def test_a_clip_that_needs_too_much_memory_ends_only_its_decoder_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_child(monkeypatch, "video_process.VIDEO_MEMORY = 1")
    with pytest.raises(BadItem, match="MiB of memory to decode"):
        read(heavy())


@pytest.mark.parametrize(
    ("demuxer", "playlist"),
    [
        ("concat", "file {}\n"),
        ("hls", "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}.ts\n#EXT-X-ENDLIST\n"),
    ],
)
def test_no_file_that_a_video_names_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demuxer: str, playlist: str
) -> None:
    """A thread that opens a pipe to write waits until somebody opens it to read."""
    monkeypatch.chdir(tmp_path)
    named = [tmp_path / "pipe", tmp_path / "pipe.ts"]
    waiting = []
    for path in named:
        os.mkfifo(path)
        waiting.append(threading.Thread(target=path.write_bytes, args=[b""]))
        waiting[-1].start()
    with_child(monkeypatch, f"video_process._DEMUXERS['MP4'] = '{demuxer}'")
    monkeypatch.setattr("backend.engine.media.video.require_format", lambda *_: "MP4")
    try:
        with pytest.raises(BadItem, match="cannot be decoded"):
            read(playlist.format("pipe").encode())
        assert all(thread.is_alive() for thread in waiting)
    finally:
        for path, thread in zip(named, waiting, strict=True):
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            thread.join()


def test_videos_share_the_pixels_that_images_leave() -> None:
    limits = MediaLimits(image_pixels=64 * 64 * 4, video_frames=4)
    texts = [in_base64(CLIP)] * 5
    first, *_, last = decode([], [], limits, texts).videos
    assert sum(one.width * one.height for one in first.frames) <= 64 * 64 * 4 * 4 / 5
    assert last.frames
    with pytest.raises(InvalidRequest, match=r"Videos\[0\] has \d+ pixels left of the 9600"):
        decode([], [], MediaLimits(image_pixels=2400), texts[:1])


def test_the_number_of_videos_of_a_request_is_limited() -> None:
    sentence = "Videos has 2 items, but a prompt may have 1: .* a larger limit_mm_per_prompt.video"
    with pytest.raises(InvalidRequest, match=sentence):
        decode([], [], MediaLimits(videos=1), [in_base64(CLIP)] * 2)


@settings(max_examples=25 if TEST_LONG else 10, deadline=None)
@given(
    st.sampled_from([CLIP, H264, WEBM, saved_as_gif(FRAMES[:4])]),
    st.integers(0, 1 << 32),
)
def test_a_damaged_clip_gives_frames_or_a_refusal(content: bytes, seed: int) -> None:
    sentence = "frames"
    try:
        assert read(damage(content, seed)).frames
    except BadItem as bad:
        sentence = str(bad)
    assert len(sentence) < 300


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        (signal.SIGSEGV, BadItem, "crashes the decoder"),
        (signal.SIGILL, EngineFailed, "videos was ended by SIGILL: this CPU lacks"),
    ],
)
def test_only_an_instruction_that_the_cpu_lacks_is_not_the_clips_fault(
    number: signal.Signals,
    error: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run: Any = bounded_process.output_of

    def run_and_kill(*given: Any) -> Any:
        return run(*given, lambda child: os.kill(child.pid, number))

    monkeypatch.setattr("backend.engine.media.child.output_of", run_and_kill)
    with pytest.raises(error, match=words):
        decode_video(CLIP, 1 << 20, LIMITS)
