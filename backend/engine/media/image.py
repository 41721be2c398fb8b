"""Decodes an image file from untrusted bytes to pixels: upright, RGB, within limits.

Pillow may use only the format that the first bytes show, so plugins of Pillow that start other
programs cannot run. All limits are checked against the header, before pixels need memory. A JPEG is
decoded at a half, a quarter or an eighth of its size if the model does not use more pixels, or if
more pixels are not allowed. The other formats do not support this.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from backend.engine.media.items import BadItem, DecodedImage
from backend.engine.media.kinds import require_format
from backend.engine.media.limits import IMAGES_IN_ALL, shape_problem

FORMATS = ("PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF")
LARGE = 4 << 20  # pixels; larger JPEGs may be decoded at a reduced size
_REDUCTIONS = (1, 2, 4, 8)
_SPARE = 2  # JPEGs are decoded at this multiple of the needed sides, as Pillow's thumbnails are
_STRIP = 1 << 22  # bytes that are hashed in one call
_SCAN = b"\xff\xda"  # the marker before each scan, which cannot occur in a scan's data
_SCANS = 200  # maximum number of scans in a JPEG; ten are usual, and each processes all pixels
_WHITE = (255, 255, 255, 255)
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
_PLAIN = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")

# Pillow warns about single broken files, which would fill the process's log (stderr).
warnings.filterwarnings("ignore", module=r"PIL\..*")


def decode_image(
    content: bytes, most: int, allowed: int, used: Callable[[], int | None] = lambda: None
) -> DecodedImage:
    """Decode the image in a file.

    most: pixels that this request may still use.
    allowed: maximum number of pixels of an image.
    used: returns the number of pixels to which the model's processor scales a large image down;
        None if this number is unknown.

    Raises BadItem.
    """
    name = require_format(content, "image", FORMATS)
    try:
        image = _upright(_opened(content, name, most, allowed, used))
        pixels = _on_white(image)
    except BadItem:
        raise
    except Exception as fault:
        # Pillow does not document what a broken file raises: OSError, SyntaxError, ValueError,
        # struct.error, KeyError and MemoryError have been seen.
        raise BadItem(f"is a {name} image that cannot be decoded: {_why(fault)}") from None
    return image_of(pixels)


def image_of(pixels: Image.Image) -> DecodedImage:
    """Return an RGB image with its size and digest."""
    width, height = pixels.size
    digest = hashlib.sha256(f"{width}x{height}:".encode())
    rows = max(_STRIP // (3 * width), 1)
    for top in range(0, height, rows):
        digest.update(pixels.crop((0, top, width, min(top + rows, height))).tobytes())
    return DecodedImage(pixels, digest.digest(), width, height)


def _opened(
    content: bytes, name: str, most: int, allowed: int, used: Callable[[], int | None]
) -> Image.Image:
    """Open an image, and check its size before its pixels are read."""
    if name == "WebP":
        # Pillow allocates memory for all pixels as soon as it opens a WebP file.
        _require_size(*_webp_size(content), most, allowed)
    if name == "JPEG" and (scans := content.count(_SCAN)) > _SCANS:
        raise BadItem(
            f"is a JPEG image of {scans} scans, but at most {_SCANS} are read: save it again"
        )
    try:
        image = Image.open(BytesIO(content), formats=[name.upper()])
    except Image.DecompressionBombError:
        raise BadItem(
            f"is larger than the {allowed} pixels that an image may have: send it smaller"
        ) from None
    if problem := shape_problem(*image.size):
        raise BadItem(problem)
    large = math.prod(image.size) > min(LARGE, most)
    if isinstance(image, JpegImageFile) and large and _decodes_by_rows(image, content):
        _reduce(image, most, used())
    _require_size(*image.size, most, allowed)
    return image


def _decodes_by_rows(image: JpegImageFile, content: bytes) -> bool:
    """Return whether all components of a JPEG are in one scan.

    Other JPEGs need memory for all pixels at the same time.
    """
    whole = _SCAN + (6 + 2 * image.layers).to_bytes(2, "big") + bytes([image.layers])
    return "progressive" not in image.info and content.count(whole) == content.count(_SCAN)


def _reduce(image: Image.Image, most: int, used: int | None) -> None:
    """Let a JPEG be decoded at a reduced size if fewer pixels are used or allowed."""
    width, height = image.size

    def least(pixels: float, reduction: int) -> bool:
        return min(width, height) >= _SPARE * math.sqrt(pixels) * reduction

    by_use = max((r for r in _REDUCTIONS if used and least(used, r)), default=1)
    fitting = (r for r in _REDUCTIONS if -(-width // r) * -(-height // r) <= most)
    reduction = max(by_use, next(fitting, 1))
    image.draft(None, (width // reduction, height // reduction))


def _webp_size(content: bytes) -> tuple[int, int]:
    """Return the width and height in the header (RFC 9649). Raises BadItem."""

    def number(data: bytes) -> int:
        return int.from_bytes(data, "little")

    match content[12:16], content[20:30]:
        case b"VP8X", data if len(data) == 10:
            return number(data[4:7]) + 1, number(data[7:]) + 1
        case b"VP8L", data if len(data) == 10 and data[0] == 0x2F:
            bits = number(data[1:5])
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ", data if len(data) == 10 and data[3:6] == b"\x9d\x01\x2a":
            return number(data[6:8]) & 0x3FFF, number(data[8:]) & 0x3FFF
    raise BadItem("is a WebP image that cannot be decoded: its header is broken; save it again")


def _require_size(width: int, height: int, most: int, allowed: int) -> None:
    size = f"is {width} x {height} pixels"
    if problem := shape_problem(width, height):
        raise BadItem(problem)
    if width * height > allowed:
        raise BadItem(
            f"{size}, but an image may have {allowed} in all: send it smaller, or load the model"
            " with a larger max_image_pixels"
        )
    if width * height > most:
        raise BadItem(
            f"{size}, but the images of a request may have {allowed * IMAGES_IN_ALL} in all, of"
            f" which {most} are left: send fewer or smaller images"
        )


def _upright(image: Image.Image) -> Image.Image:
    """Read the image's pixels, and turn the image as its EXIF orientation states.

    If the orientation cannot be read, the image is not turned, as in every viewer.
    """
    image.load()
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)  # a copy would double the memory
    return image


def _on_white(image: Image.Image) -> Image.Image:
    """Convert the image to RGB, on white. Raises BadItem for samples of an unknown range."""
    mode = image.mode
    if mode in _SIXTEEN_BITS:
        high = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return Image.fromarray(high).convert("RGB")
    if mode in _WITH_ALPHA or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, _WHITE), layer).convert("RGB")
    if mode not in _PLAIN:
        raise BadItem(f"has pixels of the kind {mode}: save it with 8 or 16 bits per channel")
    if mode == "RGB" and isinstance(image, JpegImageFile):
        image.info.clear()  # so that no later code turns the image again
        return image  # a conversion would copy it
    return image.convert("RGB")


def _why(fault: Any) -> str:
    """Return Pillow's reason in one line; a general reason if it is long or contains an address."""
    if isinstance(fault, MemoryError):
        return "it needs more memory than is available"
    text = " ".join(str(fault).split())
    if not text or "<" in text or len(text) > 120:
        return "its data is broken"
    return text
