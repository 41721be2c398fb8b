"""How much media a request may bring: bounds that hold before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass

from backend.engine.errors import InvalidRequest
from backend.engine.settings import Settings
from backend.engine.units import MIB

DEFAULT_COUNT = 16
MAX_SIDE = 16_384
MAX_RATIO = 200
PICTURES_IN_ALL = 4


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Bounds of one load, for each request.

    images, audios: items. item_bytes: of one item, encoded as its file is.
    image_pixels: of one image; all images of a request together may have `PICTURES_IN_ALL` times
    as many. audio_seconds: of all sounds of a request together. allow_paths: whether an item may
    be a path of a file on this machine.
    """

    images: int = DEFAULT_COUNT
    audios: int = DEFAULT_COUNT
    item_bytes: int = 64 * MIB
    image_pixels: int = 33_554_432
    audio_seconds: int = 600
    allow_paths: bool = False


def media_limits(settings: Settings, images: int, audios: int) -> MediaLimits:
    """The limits of a load, from its settings and its Limit…PerPrompt fields; 0 means not set.

    Raises InvalidRequest for a negative count.
    """
    for name, count in (("LimitImagePerPrompt", images), ("LimitAudioPerPrompt", audios)):
        if count < 0:
            raise InvalidRequest(
                f"{name} is {count}: send how many items, or 0 for {DEFAULT_COUNT}"
            )
    return MediaLimits(
        images=images or DEFAULT_COUNT,
        audios=audios or DEFAULT_COUNT,
        item_bytes=settings.max_media_mib * MIB,
        image_pixels=settings.max_image_pixels,
        audio_seconds=settings.max_audio_seconds,
        allow_paths=settings.allow_media_paths,
    )
