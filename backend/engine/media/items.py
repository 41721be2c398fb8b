"""Decoded media items, and the errors about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

SOUND_RATE = 16_000


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded image: upright, RGB, with transparency replaced by white.

    digest: SHA-256 of size and pixels. Equal images from different files have equal digests.
    """

    pixels: Image
    digest: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Sound:
    """Decoded audio.

    samples: float32, (n,), one channel.
    rate: samples per second, 16,000.
    digest: SHA-256 of rate and samples.
    """

    samples: Any
    rate: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Video:
    """Frames of a video, all of the same size.

    places: the index of each frame in the video.
    count: number of frames in the video.
    rate: frames per second in the video.
    digest: SHA-256 of frames, `places`, `count` and `rate`.
    cost: processor time that decoding took, in seconds.
    """

    frames: tuple[Picture, ...]
    places: tuple[int, ...]
    count: int
    rate: float
    digest: bytes
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Media:
    """A request's decoded media, each kind in the order of the request."""

    pictures: tuple[Picture, ...] = ()
    videos: tuple[Video, ...] = ()
    sounds: tuple[Sound, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pictures or self.videos or self.sounds)


class BadItem(Exception):
    """An item cannot be used. The error's text continues a message about the item."""
