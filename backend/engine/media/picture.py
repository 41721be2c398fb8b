"""One image file to a picture: upright, RGB, within bounds, whatever the bytes are.

Pillow is given the one format that the bytes begin as, so none of its plugins that start other
programs can be reached. All bounds are checked against the header, before pixels take memory.
"""

from __future__ import annotations

import hashlib
import warnings
from contextlib import suppress
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from backend.engine.media.items import BadItem, Picture
from backend.engine.media.kinds import kind_of
from backend.engine.media.limits import MAX_RATIO, MAX_SIDE, PICTURES_IN_ALL

FORMATS = ("PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF")
_SCANS = 200  # of a progressive JPEG: ten are usual, and each costs a pass over all pixels
_WHITE = (255, 255, 255, 255)
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
_PLAIN = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")

# Pillow's warnings tell of single broken files, and stderr is the log of the process.
warnings.filterwarnings("ignore", module=r"PIL\..*")


def decode_picture(content: bytes, most: int, allowed: int) -> Picture:
    """The picture in a file.

    most: pixels that it may have. allowed: pixels that one image of a request may have, where
    `most` is what the images before it left over. Raises BadItem.
    """
    name = _format_of(content)
    try:
        image = _upright(_opened(content, name, most, allowed))
        pixels = _on_white(image)
    except BadItem:
        raise
    except Exception as fault:
        # Pillow names no closed list of what a broken file raises: OSError, SyntaxError,
        # ValueError, struct.error, KeyError and MemoryError were all seen.
        raise BadItem(f"is a {name} image that cannot be decoded: {_why(fault)}") from None
    width, height = pixels.size
    digest = hashlib.sha256(f"{width}x{height}:".encode())
    digest.update(pixels.tobytes())
    return Picture(pixels, digest.digest(), width, height)


def _format_of(content: bytes) -> str:
    name = kind_of(content)
    if name is None:
        raise BadItem(f"is no image file that is known here: send {_choice()}")
    if name not in FORMATS:
        article = "an" if name[0] in "AHIMOS" and name != "HEIC" else "a"
        raise BadItem(f"is {article} {name} file, which is not decoded here: send {_choice()}")
    return name


def _choice() -> str:
    return f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


def _opened(content: bytes, name: str, most: int, allowed: int) -> Image.Image:
    """The image with its size checked and its pixels not yet read."""
    if name == "WebP":
        # Pillow's reader takes memory for the whole canvas as soon as it opens the file.
        size = _webp_size(content)
        if size is None:
            raise BadItem("is a WebP image that cannot be decoded: its header is broken")
        _require_size(*size, most, allowed)
    if name == "JPEG" and (scans := content.count(b"\xff\xda")) > _SCANS:
        raise BadItem(
            f"is a JPEG image of {scans} scans, and at most {_SCANS} are read: save it again"
        )
    try:
        image = Image.open(BytesIO(content), formats=[name.upper()])
    except Image.DecompressionBombError:
        raise BadItem(
            f"is larger than the {allowed} pixels that an image may have: send it smaller"
        ) from None
    _require_size(*image.size, most, allowed)
    return image


def _webp_size(content: bytes) -> tuple[int, int] | None:
    """Width and height by the header (RFC 9649), or None where it gives neither."""

    def number(data: bytes) -> int:
        return int.from_bytes(data, "little")

    chunk, data = content[12:16], content[20:30]
    if len(data) < 10:
        return None
    if chunk == b"VP8X":
        return number(data[4:7]) + 1, number(data[7:10]) + 1
    if chunk == b"VP8L" and data[0] == 0x2F:
        bits = number(data[1:5])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 " and data[3:6] == b"\x9d\x01\x2a":
        return number(data[6:8]) & 0x3FFF, number(data[8:10]) & 0x3FFF
    return None


def _require_size(width: int, height: int, most: int, allowed: int) -> None:
    says = f"is {width} x {height} pixels"
    if min(width, height) < 1:
        raise BadItem(f"{says}: it has no content")
    if max(width, height) > MAX_SIDE:
        raise BadItem(f"{says}, and a side may have {MAX_SIDE}: send it smaller")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise BadItem(f"{says}, and one side may be {MAX_RATIO} times the other: crop it")
    if width * height > allowed:
        raise BadItem(
            f"{says}, and an image may have {allowed} in all: send it smaller, or load the model"
            " with a larger max_image_pixels"
        )
    if width * height > most:
        raise BadItem(
            f"{says}, and the images of a request may have {allowed * PICTURES_IN_ALL} in all, of"
            f" which {most} are left: send fewer or smaller ones"
        )


def _upright(image: Image.Image) -> Image.Image:
    """The pixels, read and turned as the camera's note says.

    A note that cannot be read turns nothing: every viewer shows such an image as it is stored.
    """
    image.load()
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)  # a copy would double the memory
    return image


def _on_white(image: Image.Image) -> Image.Image:
    """The image in RGB. Raises BadItem for samples whose range nothing tells."""
    mode = image.mode
    if mode in _SIXTEEN_BITS:
        high = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return Image.fromarray(high).convert("RGB")
    if mode in _WITH_ALPHA or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, _WHITE), layer).convert("RGB")
    if mode not in _PLAIN:
        raise BadItem(f"has pixels of the kind {mode}: save it with 8 or 16 bits per channel")
    return image.convert("RGB")


def _why(fault: Any) -> str:
    """Pillow's reason, without addresses of objects and cut to one short line."""
    if isinstance(fault, MemoryError):
        return "it needs more memory than there is"
    text = " ".join(str(fault).split())
    if not text or "<" in text or len(text) > 120:
        return "its data is broken"
    return text
