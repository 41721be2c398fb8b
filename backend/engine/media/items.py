"""Decoded media items, and the errors about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

AUDIO_RATE = 16_000
MAX_CHANNELS = 8
RATES = range(4_000, 192_001)


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """A decoded image: upright, RGB, with transparency replaced by white."""

    pixels: Image
    # SHA-256 of size and pixels. Equal images from different files have equal digests.
    digest: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    """Decoded audio."""

    samples: Any  # float32, (n,), one channel
    rate: int  # samples per second, 16,000
    digest: bytes  # SHA-256 of rate and samples


@dataclass(frozen=True, slots=True)
class Video:
    """Frames of a video, all of the same size."""

    frames: tuple[DecodedImage, ...]
    indices: tuple[int, ...]  # the index of each frame in the video
    count: int  # number of frames in the video
    rate: float  # frames per second in the video
    digest: bytes  # SHA-256 of frames, `indices`, `count` and `rate`
    cost: float = 0.0  # processor time that decoding took, in seconds


MediaContent = DecodedImage | DecodedAudio | Video


@dataclass(frozen=True, slots=True)
class Media:
    """A request's decoded media, each kind in the order of the request."""

    images: list[DecodedImage]
    videos: list[Video]
    audios: list[DecodedAudio]


class BadItem(Exception):
    """An item cannot be used. The error's text continues a message about the item."""


def require_form(channels: int, rate: int) -> None:
    """Raise BadItem for too many channels, or an unusual number of samples per second."""
    if channels > MAX_CHANNELS:
        raise BadItem(
            f"has {channels} channels, but at most {MAX_CHANNELS} are mixed: send fewer channels"
        )
    if rate not in RATES:
        raise BadItem(
            f"has {rate} samples per second: send audio with {RATES.start} to {RATES.stop - 1}"
        )
