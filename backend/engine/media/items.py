"""Decoded media items, and the errors about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

SOUND_RATE = 16_000


@dataclass(frozen=True, slots=True)
class Picture:
    """One image: upright, RGB, with transparency replaced by white.

    digest: SHA-256 of size and pixels, so equal images from different files have equal digests.
    """

    pixels: Image
    digest: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Sound:
    """One recording: float32 samples of shape (n,), one channel at `rate` (16,000) per second."""

    samples: Any
    rate: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Video:
    """Frames of one video, all of the same size.

    places: the index of each frame in the video, which has `count` frames at `rate` per second.
    digest: SHA-256 of frames and places.
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
    """A request's decoded media, in the order in which they were sent."""

    pictures: tuple[Picture, ...] = ()
    videos: tuple[Video, ...] = ()
    sounds: tuple[Sound, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pictures or self.videos or self.sounds)


class BadItem(Exception):
    """Why an item cannot be used, as the rest of a sentence whose subject is the item."""
