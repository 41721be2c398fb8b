"""The limits on the media of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from backend.engine.errors import InvalidRequest
from backend.engine.units import MIB

if TYPE_CHECKING:
    from backend.engine.settings import Settings  # the programs that decode media need none

DEFAULT_COUNT = 16
MAX_SIDE = 16_384
MAX_RATIO = 200
IMAGES_IN_ALL = 4
LEAST_PIXELS = 32 * 32  # a smaller video frame is accepted by no processor
RECORDING_SECONDS = 7200  # maximum length of a recording to transcribe
AUDIO_CPU_SECONDS: Final = 60
AUDIO_MEMORY: Final = 512 * MIB
VIDEO_CPU_SECONDS: Final = 30
VIDEO_WALL_SECONDS: Final = 120
VIDEO_MEMORY: Final = 1024 * MIB


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """The limits of one loaded model, for each request."""

    # Maximum number of items of each kind.
    images: int = DEFAULT_COUNT
    videos: int = DEFAULT_COUNT
    audios: int = DEFAULT_COUNT
    item_bytes: int = 64 * MIB  # maximum size of an item's file
    # Maximum number of pixels of an image, of a stored video frame, and of all frames together that
    # are used of a video. All images and videos of a request together may have `IMAGES_IN_ALL`
    # times as many.
    image_pixels: int = 33_554_432
    video_frames: int = 16  # maximum number of frames that are used of a video
    video_seconds: int = 3600  # maximum length of a video
    audio_seconds: int = 600  # maximum length of all audio of a request together
    allow_paths: bool = False  # whether an item may be the path of a file on this machine


def shape_problem(width: int, height: int) -> str:
    """Return why an image or frame of this size in pixels is refused; "" if it is accepted."""
    size = f"is {width} x {height} pixels"
    if min(width, height) < 1:
        return f"{size}, so it is empty"
    if max(width, height) > MAX_SIDE:
        return f"{size}, but a side may have at most {MAX_SIDE}: send it smaller"
    if max(width, height) > MAX_RATIO * min(width, height):
        return f"{size}, but one side may be at most {MAX_RATIO} times the other: crop it"
    return ""


def media_limits(settings: Settings, images: int, audios: int, videos: int = 0) -> MediaLimits:
    """Return the limits of a load. Raises InvalidRequest for a negative count.

    images, audios, videos: the fields Limit…PerPrompt; 0 means not set.
    """
    for kind, count in (("Image", images), ("Video", videos), ("Audio", audios)):
        if count < 0:
            raise InvalidRequest(
                f"Limit{kind}PerPrompt is {count}: send a number of items, or 0 for {DEFAULT_COUNT}"
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
