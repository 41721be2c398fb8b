"""Video clips, encoded here except one in H.264, for which no encoder is installed."""

from __future__ import annotations

import base64
import struct
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

RED, GREEN, BLUE = (220, 30, 30), (30, 160, 60), (40, 70, 220)
H264 = (Path(__file__).parent / "red_then_blue.mp4").read_bytes()
"""An MP4 of a second of red and a second of blue, 64 x 64 pixels, 8 frames a second."""

Colour = tuple[int, int, int]


def plain(colours: Sequence[Colour], size: tuple[int, int] = (64, 64)) -> list[Any]:
    """A frame [height, width, 3] of each colour."""
    return [np.full((size[1], size[0], 3), colour, np.uint8) for colour in colours]


def saved(
    frames: Sequence[Any], name: str = "clip.mp4", codec: str = "mp4v", rate: float = 8
) -> bytes:
    """The file that OpenCV writes for these frames."""
    height, width = frames[0].shape[:2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        four = cv2.VideoWriter.fourcc(*codec)
        writer = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, four, rate, (width, height))
        assert writer.isOpened()
        for frame in frames:
            writer.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
        writer.release()
        return path.read_bytes()


def saved_as_gif(frames: Sequence[Any], milliseconds: int = 125) -> bytes:
    first, *others = map(Image.fromarray, frames)
    file = BytesIO()
    first.save(file, "GIF", save_all=True, append_images=others, duration=milliseconds)
    return file.getvalue()


def lasting(content: bytes, seconds: int) -> bytes:
    """An MP4 whose headers say that its frames last that long."""
    data = bytearray(content)
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
