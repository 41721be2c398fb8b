"""How much media a request may bring: bounds that hold before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from backend.engine.errors import InvalidRequest
from backend.engine.settings import Settings
from backend.engine.units import MIB

DEFAULT_COUNT = 16
MAX_SIDE = 16_384
MAX_RATIO = 200
PICTURES_IN_ALL = 4
LEAST_PIXELS = 32 * 32  # of a frame of a video: the least that the families' processors take
VIDEO_CPU_SECONDS: Final = 30
VIDEO_WALL_SECONDS: Final = 120
VIDEO_MEMORY: Final = 1024 * MIB
VIDEO_TOO_LARGE: Final = 70
"""Exit code of a process whose video took more than VIDEO_MEMORY."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Bounds of one load, for each request.

    images, videos, audios: items. item_bytes: of one item, encoded as its file is.
    image_pixels: of one image, of one frame of a video as it is stored, and of all its frames as
    they are shown; all images and videos of a request together may have `PICTURES_IN_ALL` times as
    many. video_frames: that are taken from one video at most. video_seconds: of one video.
    audio_seconds: of all sounds of a request together. allow_paths: whether an item may be a path
    of a file on this machine.
    """

    images: int = DEFAULT_COUNT
    videos: int = DEFAULT_COUNT
    audios: int = DEFAULT_COUNT
    item_bytes: int = 64 * MIB
    image_pixels: int = 33_554_432
    video_frames: int = 16
    video_seconds: int = 3600
    audio_seconds: int = 600
    allow_paths: bool = False


def shape_problem(width: int, height: int) -> str:
    """Why no picture or frame may have these sides, in pixels; "" if it may."""
    says = f"is {width} x {height} pixels"
    if min(width, height) < 1:
        return f"{says}: it has no content"
    if max(width, height) > MAX_SIDE:
        return f"{says}, and a side may have {MAX_SIDE}: send it smaller"
    if max(width, height) > MAX_RATIO * min(width, height):
        return f"{says}, and one side may be {MAX_RATIO} times the other: crop it"
    return ""


def media_limits(settings: Settings, images: int, audios: int, videos: int = 0) -> MediaLimits:
    """The limits of a load, from its settings and its Limit…PerPrompt fields; 0 means not set.

    Raises InvalidRequest for a negative count.
    """
    counts = {
        "LimitImagePerPrompt": images,
        "LimitVideoPerPrompt": videos,
        "LimitAudioPerPrompt": audios,
    }
    for name, count in counts.items():
        if count < 0:
            raise InvalidRequest(
                f"{name} is {count}: send how many items, or 0 for {DEFAULT_COUNT}"
            )
    return MediaLimits(
        images=images or DEFAULT_COUNT,
        videos=videos or DEFAULT_COUNT,
        audios=audios or DEFAULT_COUNT,
        item_bytes=settings.max_media_mib * MIB,
        image_pixels=settings.max_image_pixels,
        video_frames=settings.video_frames,
        video_seconds=settings.max_video_seconds,
        audio_seconds=settings.max_audio_seconds,
        allow_paths=settings.allow_media_paths,
    )
