"""Video clips, encoded here."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np
from PIL import Image

RED, GREEN, BLUE = (220, 30, 30), (30, 160, 60), (40, 70, 220)
_PIXELS = {"mjpeg": "yuvj420p", "huffyuv": "yuv422p"}

Colour = tuple[int, int, int]


def plain(colours: Sequence[Colour], size: tuple[int, int] = (64, 64)) -> list[Any]:
    """A frame [height, width, 3] of each colour."""
    return [np.full((size[1], size[0], 3), colour, np.uint8) for colour in colours]


def saved(
    frames: Sequence[Any],
    name: str = "clip.mp4",
    codec: str = "mpeg4",
    rate: float = 8,
    turned: int = 0,
    **options: str,
) -> bytes:
    """The file that FFmpeg writes for these frames.

    turned: degrees by which a player rotates them, counterclockwise. options: of the encoder.
    """
    file = BytesIO()
    file.name = name  # its ending is the format
    with av.open(file, "w") as video:
        stream: Any = video.add_stream(codec, Fraction(rate), options=options)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = _PIXELS.get(codec, "yuv420p")
        if turned:
            stream.set_display_rotation(turned)
        for frame in frames:
            video.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        video.mux(stream.encode(None))
    return file.getvalue()


def saved_as_gif(frames: Sequence[Any], milliseconds: int = 125) -> bytes:
    first, *others = map(Image.fromarray, frames)
    file = BytesIO()
    first.save(file, "GIF", save_all=True, append_images=others, duration=milliseconds)
    return file.getvalue()


def held(content: bytes, count: int) -> bytes:
    """An MP4 whose second frame is repeated so many times: small, with much to decode."""
    source, file = av.open(BytesIO(content), "r"), BytesIO()
    first: Any
    second: Any
    with source, av.open(file, "w", "mp4") as video:
        stream = video.add_stream_from_template(source.streams.video[0])
        first, second, *_ = source.demux(video=0)
        step = second.pts - first.pts
        first.stream = second.stream = stream
        video.mux(first)
        for at in range(1, count + 1):
            second.pts = second.dts = first.pts + at * step
            video.mux(second)
    return file.getvalue()


def lasting(content: bytes, seconds: int) -> bytes:
    """An MP4 whose headers say that its frames last that long."""
    data = bytearray(content.replace(b"edts", b"free"))  # an edit list would cut them
    for box in (b"mvhd", b"mdhd"):
        at = data.index(box) + 4
        assert data[at] == 0, "its numbers have 32 bits"
        duration = at + 16
        (scale,) = struct.unpack_from(">I", data, at + 12)
        struct.pack_into(">I", data, duration, seconds * scale)
    at = data.index(b"stts")
    (entries,) = struct.unpack_from(">I", data, at + 8)
    (frames,) = struct.unpack_from(">I", data, at + 12)
    assert entries == 1
    (scale,) = struct.unpack_from(">I", data, data.index(b"mdhd") + 16)
    struct.pack_into(">I", data, at + 16, seconds * scale // frames)
    return bytes(data)


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


H264 = saved(plain([RED] * 8 + [BLUE] * 8), codec="libx264")
"""An MP4 of a second of red and a second of blue, 64 x 64 pixels, 8 frames a second."""
