"""The program that extracts frames from one video, run as a child process; see `video`.

Standard input is the video as a regular file; the first argument is `Task` as JSON. The program
writes one line of JSON: `refusal`, or the fields of `Found`, followed by the frames (8-bit RGB, row
by row). If the video exceeds a limit, the process ends: by SIGXCPU (time), or with the exit code
TOO_LARGE (memory); see `common.bounded_process`.

OpenCV's FFmpeg may read only the containers and codecs listed here, and nothing over a network.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from backend.engine.media.limits import VIDEO_MEMORY, shape_problem
from common.bounded_process import limit_own_process

_DEMUXERS = {
    "MP4": "mov,mp4,m4a,3gp,3g2,mj2",
    "QuickTime": "mov,mp4,m4a,3gp,3g2,mj2",
    "WebM or Matroska": "matroska,webm",
    "AVI": "avi",
    "GIF": "gif",
}
FORMATS = tuple(_DEMUXERS)
# The decoders that FFmpeg may use, and the codecs by OpenCV's names.
_DECODERS = "h264,hevc,vp8,libvpx,vp9,libvpx-vp9,mpeg4,mpeg2video,h263,mjpeg,gif"
_CODECS = {b"h264", b"hevc", b"VP80", b"VP90", b"FMP4", b"mpg2", b"h263", b"MJPG", b"gif "}
_BROKEN = "cannot be decoded: its data is broken"
# minimum share of the frames that the header states; with fewer, the video counts as truncated
_WHOLE = 0.9


@dataclass(frozen=True, slots=True)
class Task:
    """The limits for decoding a video.

    kind: one of FORMATS. frames: maximum number of frames to return. pixels: maximum of one stored
    frame. kept_pixels: maximum of all returned frames together, which are scaled down to it.
    seconds: maximum length of the video. cpu_seconds: maximum processor time.
    """

    kind: str
    frames: int
    pixels: int
    kept_pixels: int
    seconds: int
    cpu_seconds: int


@dataclass(frozen=True, slots=True)
class Found:
    """A decoded video.

    width, height: of the returned frames. places: the index of each of them in the video, which has
    `count` frames at `rate` per second. cost: processor time of decoding, in seconds.
    """

    width: int
    height: int
    places: Sequence[int]
    count: int
    rate: float
    cost: float


class _RefusedError(Exception):
    """Why a video is refused, as the rest of a sentence whose subject is the video."""


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] = (
        f"protocol_whitelist;file|format_whitelist;{_DEMUXERS[task.kind]}"
        f"|codec_whitelist;{_DECODERS}"
    )
    import cv2

    cv2.setNumThreads(1)
    limit_own_process(task.cpu_seconds, VIDEO_MEMORY)
    try:
        found, frames = _extract(task)
    except _RefusedError as refusal:
        print(json.dumps({"refusal": str(refusal)}), flush=True)
        return
    except (cv2.error, MemoryError):
        print(json.dumps({"refusal": _BROKEN}), flush=True)
        return
    sys.stdout.buffer.write(json.dumps(asdict(found)).encode() + b"\n")
    for frame in frames:
        sys.stdout.buffer.write(frame)
    sys.stdout.buffer.flush()


def _extract(task: Task) -> tuple[Found, list[bytes]]:
    """Evenly spaced frames, including the first and the last. Raises _RefusedError."""
    import cv2

    video = _opened()
    width, height = (
        int(video.get(side)) for side in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
    )
    _require_size(width, height, task.pixels)
    claimed, rate = video.get(cv2.CAP_PROP_FRAME_COUNT), video.get(cv2.CAP_PROP_FPS)
    count = 0
    if 0 < claimed < math.inf and 0 < rate < math.inf:
        _require_short(claimed / rate, task.seconds)
        count = int(claimed)
        places = _even(count, task.frames)
        frames = _frames(video, places, task.kept_pixels, seek=True)
    if not count or len(frames) < len(places):
        # The header of a live recording has no number of frames, and others only an estimate.
        there, rate = _counted(_opened(), task.seconds)
        if there < _WHOLE * count:
            raise _RefusedError(f"is truncated: it has {there} of {count} frames")
        count, places = there, _even(there, task.frames)
        frames = _frames(_opened(), places, task.kept_pixels, seek=False)
    if not frames or len(frames) < len(places):
        raise _RefusedError(_BROKEN)
    height, width = frames[0].shape[:2]
    if any(frame.shape != (height, width, 3) for frame in frames):
        raise _RefusedError("has frames of different sizes: encode it with one frame size")
    found = Found(width, height, places, count, rate, time.process_time())
    return found, [frame.tobytes() for frame in frames]


def _opened() -> Any:
    import cv2

    os.lseek(0, 0, os.SEEK_SET)
    video = cv2.VideoCapture("/dev/fd/0", cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    if not video.isOpened():
        raise _RefusedError("cannot be decoded: it is broken or cut off, or its codec is unusual")
    codec = int(video.get(cv2.CAP_PROP_FOURCC)) & 0xFFFFFFFF
    if codec.to_bytes(4, "little") not in _CODECS:
        raise _RefusedError(
            "has a codec that is not decoded here: send H.264, HEVC, VP8, VP9 or MPEG-4"
        )
    return video


def _require_size(width: int, height: int, pixels: int) -> None:
    if problem := shape_problem(width, height):
        raise _RefusedError(problem)
    if width * height > pixels:
        raise _RefusedError(
            f"is {width} x {height} pixels, but a frame may have {pixels} in all: send it smaller,"
            " or load the model with a larger max_image_pixels"
        )


def _require_short(seconds: float, most: int) -> None:
    if seconds > most:
        raise _RefusedError(
            f"lasts longer than {most} seconds: send a part of it, or load the model with a larger"
            " max_video_seconds"
        )


def _even(count: int, most: int) -> list[int]:
    """The indices of at most `most` evenly spaced frames, from the first to the last of `count`."""
    taken = min(count, most)
    if taken < 2:
        return [0][:taken]
    return [round(at * (count - 1) / (taken - 1)) for at in range(taken)]


def _frames(video: Any, places: Sequence[int], most_pixels: int, *, seek: bool) -> list[Any]:
    """The frames at these indices, RGB [height, width, 3]; fewer if one cannot be read.

    seek: jump to each frame, which OpenCV can do only if it knows the number of frames.
    """
    import cv2

    frames: list[Any] = []
    at = 0
    for place in places:
        if place != at and seek:
            video.set(cv2.CAP_PROP_POS_FRAMES, place)
        while not seek and at < place and video.grab():
            at += 1
        there, frame = video.read()
        if not there:
            break
        at = place + 1
        height, width = frame.shape[:2]
        scale = math.sqrt(most_pixels / (len(places) * width * height))
        if scale < 1:
            size = max(int(width * scale), 1), max(int(height * scale), 1)
            frame = cv2.resize(frame, size, interpolation=cv2.INTER_AREA)
        frames.append(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))
    return frames


def _counted(video: Any, most_seconds: int) -> tuple[int, float]:
    """The number of frames, found by reading all of them, and frames per second."""
    import cv2

    count, seconds = 0, 0.0
    while video.grab():
        count += 1
        seconds = video.get(cv2.CAP_PROP_POS_MSEC) / 1000
        _require_short(seconds, most_seconds)
    return count, (count - 1) / seconds if seconds > 0 and count > 1 else 1.0


if __name__ == "__main__":
    main()
