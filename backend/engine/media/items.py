"""What a media item is decoded to, and the word that every refusal of one begins with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backend.engine.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

SOUND_RATE = 16_000


@dataclass(frozen=True, slots=True)
class Picture:
    """One image as the eye should see it: upright, RGB, on white where it was transparent.

    digest: SHA-256 of size and pixels, so the same picture from another file has the same one.
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
    """Frames of one video, all of one size.

    places: the number of each frame among the `count` of the video, of which `rate` are shown in a
    second. digest: SHA-256 of frames and places. cost: seconds of processor time that decoding it
    took.
    """

    frames: tuple[Picture, ...]
    places: tuple[int, ...]
    count: int
    rate: float
    digest: bytes
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Media:
    """Everything that a request brought beside its text, in the order in which it came."""

    pictures: tuple[Picture, ...] = ()
    videos: tuple[Video, ...] = ()
    sounds: tuple[Sound, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pictures or self.videos or self.sounds)


class BadItem(Exception):
    """Why one item cannot be taken: the rest of a sentence whose subject is the item."""


def refusal(name: str, why: str) -> InvalidRequest:
    """The client's sentence. `name` is the item's, such as `Images[2]`."""
    return InvalidRequest(f"{name} {why}", name)
