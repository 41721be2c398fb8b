"""Decodes a request's media within limits; the entry point of this package.

Runs on a prompt thread and does not use MLX. An item that cannot be decoded ends the request with
an error that names it. No item is ever dropped, because an answer about a picture that the model
has not seen is worse than no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from backend.engine.errors import InvalidRequest
from backend.engine.media.item_bytes import item_bytes
from backend.engine.media.items import BadItem, Media, Picture, Sound, Video, refusal
from backend.engine.media.limits import (
    LEAST_PIXELS,
    PICTURES_IN_ALL,
    VIDEO_CPU_SECONDS,
    MediaLimits,
)
from backend.engine.media.picture import decode_picture
from backend.engine.media.sound import decode_sound
from backend.engine.media.video import decode_video
from common.field_names import named

_Item = TypeVar("_Item", Picture, Video, Sound)


def decode(
    images: Sequence[str],
    audios: Sequence[str],
    limits: MediaLimits,
    videos: Sequence[str] = (),
    used: Callable[[], int | None] = lambda: None,
) -> Media:
    """Every item of a request, decoded. Raises InvalidRequest, which names the item.

    used: as for `decode_picture`.
    """
    _require_count("Images", "LimitImagePerPrompt", len(images), limits.images)
    _require_count("Videos", "LimitVideoPerPrompt", len(videos), limits.videos)
    _require_count("Audios", "LimitAudioPerPrompt", len(audios), limits.audios)
    left = limits.image_pixels * PICTURES_IN_ALL
    pictures = _pictures(images, left, limits, used)
    left -= sum(picture.width * picture.height for picture in pictures)
    return Media(pictures, _videos(videos, left, limits), _sounds(audios, limits))


def _pictures(
    images: Sequence[str], left: int, limits: MediaLimits, used: Callable[[], int | None]
) -> tuple[Picture, ...]:
    """Decode the images. left: pixels that all of them together may have."""
    pictures: list[Picture] = []
    for index, text in enumerate(images):
        most = min(limits.image_pixels, left)

        def read(content: bytes, most: int = most) -> Picture:
            return decode_picture(content, most, limits.image_pixels, used)

        picture = _item(f"Images[{index}]", text, read, limits)
        left -= picture.width * picture.height
        pictures.append(picture)
    return tuple(pictures)


def _videos(videos: Sequence[str], left: int, limits: MediaLimits) -> tuple[Video, ...]:
    """Decode the videos. left: pixels that the frames of all of them together may have."""
    decoded: list[Video] = []
    seconds: float = VIDEO_CPU_SECONDS
    for index, text in enumerate(videos):
        most = min(limits.image_pixels, left // (len(videos) - index))
        if most < limits.video_frames * LEAST_PIXELS:
            raise refusal(
                f"Videos[{index}]",
                f"has {most} pixels left of the {limits.image_pixels * PICTURES_IN_ALL} that the"
                " images and videos of a request may have: send fewer or smaller ones",
            )

        def read(content: bytes, most: int = most, seconds: float = seconds) -> Video:
            return decode_video(content, most, limits, seconds)

        video = _item(f"Videos[{index}]", text, read, limits)
        left -= sum(frame.width * frame.height for frame in video.frames)
        seconds -= video.cost
        decoded.append(video)
    return tuple(decoded)


def _sounds(audios: Sequence[str], limits: MediaLimits) -> tuple[Sound, ...]:
    sounds: list[Sound] = []
    left = float(limits.audio_seconds)
    for index, text in enumerate(audios):

        def read(content: bytes, left: float = left) -> Sound:
            return decode_sound(content, left, limits.audio_seconds)

        sound = _item(f"Audios[{index}]", text, read, limits)
        left -= len(sound.samples) / sound.rate
        sounds.append(sound)
    return tuple(sounds)


def _item(name: str, text: str, read: Callable[[bytes], _Item], limits: MediaLimits) -> _Item:
    try:
        return read(item_bytes(text, limits.item_bytes, allow_paths=limits.allow_paths))
    except BadItem as bad:
        raise refusal(name, str(bad)) from None


def _require_count(field: str, limit: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(
            f"{named(field)} has {count} items, but a prompt may have {most}: send fewer, or load"
            f" the model with a larger {limit}",
        )
