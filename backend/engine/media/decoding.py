"""Decodes a request's media within limits, for other packages.

It runs on a prompt thread and does not use MLX. An item that cannot be decoded ends the request
with an error that names the item. No item is ever dropped, because an answer about an image that
the model has not seen is worse than no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from backend.engine.errors import InvalidRequest
from backend.engine.media.audio import decode_audio
from backend.engine.media.image import decode_image
from backend.engine.media.item_bytes import item_bytes
from backend.engine.media.items import BadItem, Media
from backend.engine.media.limits import (
    IMAGES_IN_ALL,
    LEAST_PIXELS,
    RECORDING_SECONDS,
    VIDEO_CPU_SECONDS,
    MediaLimits,
)
from backend.engine.media.video import decode_video
from common.field_names import named

if TYPE_CHECKING:
    import numpy as np


def decode(
    images: Sequence[str],
    audios: Sequence[str],
    limits: MediaLimits,
    videos: Sequence[str] = (),
    used: Callable[[], int | None] = lambda: None,
) -> Media:
    """Decode every item of a request. Raises InvalidRequest, which names the item.

    images, audios, videos: the items as they are on the wire.
    used: as for `decode_image`.
    """
    for kind, items, most in (
        ("Image", images, limits.images),
        ("Video", videos, limits.videos),
        ("Audio", audios, limits.audios),
    ):
        if len(items) > most:
            raise InvalidRequest(
                f"{named(f'{kind}s')} has {len(items)} items, but a prompt may have {most}: send"
                f" fewer, or load the model with a larger limit_mm_per_prompt.{kind.lower()}"
                f" (Limit{kind}PerPrompt)"
            )
    read = partial(item_bytes, most=limits.item_bytes, allow_paths=limits.allow_paths)
    pixels = limits.image_pixels * IMAGES_IN_ALL
    left, cpu_seconds, seconds = pixels, float(VIDEO_CPU_SECONDS), float(limits.audio_seconds)
    media = Media([], [], [])
    for index, text in enumerate(images):
        most = min(limits.image_pixels, left)
        with _naming(f"Images[{index}]"):
            image = decode_image(read(text), most, limits.image_pixels, used)
        media.images.append(image)
        left -= image.width * image.height
    for index, text in enumerate(videos):
        most = min(limits.image_pixels, left // (len(videos) - index))
        with _naming(f"Videos[{index}]"):
            if most < limits.video_frames * LEAST_PIXELS:
                raise BadItem(
                    f"has {most} pixels left of the {pixels} that the images and videos of a"
                    " request may have: send fewer or smaller items"
                )
            video = decode_video(read(text), most, limits, cpu_seconds)
        media.videos.append(video)
        left -= sum(frame.width * frame.height for frame in video.frames)
        cpu_seconds -= video.cost
    for index, text in enumerate(audios):
        with _naming(f"Audios[{index}]"):
            audio = decode_audio(read(text), seconds, limits.audio_seconds)
        media.audios.append(audio)
        seconds -= len(audio.samples) / audio.rate
    return media


def decode_recording(text: str, limits: MediaLimits) -> np.ndarray:
    """Decode the recording of a transcription request. Raises InvalidRequest.

    text: base64, a data URI or a path. Hosts store their client's upload, and send its path.
    """
    with _naming("dst"):
        content = item_bytes(text, limits.item_bytes, allow_paths=True)
        samples: np.ndarray = decode_audio(content, RECORDING_SECONDS, 0).samples
        return samples


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn BadItem into an error that names the item, such as `Images[2]`."""
    try:
        yield
    except BadItem as bad:
        raise InvalidRequest(f"{named(name)} {bad}") from None
