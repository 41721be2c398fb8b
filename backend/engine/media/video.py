"""Decodes a video file to evenly spaced frames, within limits.

A child process decodes the file (`video_process`), because no codec limits all of its time and
memory, and a file that crashes a decoder must not crash the backend. The format is recognised by
the file's bytes.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict

from PIL import Image

from backend.engine.media.child import answer_of
from backend.engine.media.image import image_of
from backend.engine.media.items import Video
from backend.engine.media.kinds import require_format
from backend.engine.media.limits import (
    VIDEO_CPU_SECONDS,
    VIDEO_MEMORY,
    VIDEO_WALL_SECONDS,
    MediaLimits,
)
from backend.engine.media.video_process import FORMATS
from backend.engine.units import MIB

_PROGRAM = "backend.engine.media.video_process"
_SLOW = (
    f"takes too long to decode: the videos of a request may take {VIDEO_CPU_SECONDS} seconds of"
    " processor time together; send fewer, shorter or smaller videos, or save them with more key"
    " frames"
)
_LARGE = f"takes more than {VIDEO_MEMORY // MIB} MiB of memory to decode: send it smaller"


def decode_video(
    content: bytes, most: int, limits: MediaLimits, cpu_seconds: float = VIDEO_CPU_SECONDS
) -> Video:
    """Decode frames of a file.

    most: maximum number of pixels of all frames together. Larger frames are scaled down.
    cpu_seconds: the processor time that the request has left.

    Raises BadItem, also if decoding crashes or exceeds a limit, and EngineFailed if the video is
    not the cause.
    """
    task = {
        "kind": require_format(content, "video", FORMATS),
        "limits": asdict(limits),
        "most": most,
        "cpu_seconds": max(math.ceil(cpu_seconds), 1),
    }
    found, pixels = answer_of(_PROGRAM, task, content, VIDEO_WALL_SECONDS, "videos", _SLOW, _LARGE)
    size, indices, count, rate = found["size"], found["indices"], found["count"], found["rate"]
    each = 3 * size[0] * size[1]
    frames = tuple(
        image_of(Image.frombytes("RGB", size, pixels[at : at + each]))
        for at in range(0, each * len(indices), each)
    )
    digest = hashlib.sha256(f"{indices} {count} {rate}".encode())
    for frame in frames:
        digest.update(frame.digest)
    return Video(frames, tuple(indices), count, rate, digest.digest(), found["cost"])
