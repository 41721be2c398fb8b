"""Images of every kind that arrives: good, odd, broken, huge and hostile, each made here.

A good one states the size and the mean colour that it must decode to; a bad one the pattern that
its refusal must match.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

RED, BLUE, GREY = (255, 0, 0), (0, 0, 255), (100, 100, 100)
_SIZE = (40, 24)
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@dataclass(frozen=True)
class Good:
    name: str
    content: bytes
    size: tuple[int, int] = _SIZE
    colour: tuple[int, int, int] = RED


@dataclass(frozen=True)
class Bad:
    name: str
    content: bytes
    says: str


def save(image: Image.Image, kind: str, **how: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def plain(mode: str = "RGB", colour: Any = RED, size: tuple[int, int] = _SIZE) -> Image.Image:
    return Image.new(mode, size, colour)


def noise(size: tuple[int, int] = (64, 48)) -> Image.Image:
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3))
    return Image.fromarray(pixels.astype(np.uint8))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int,
    height: int,
    data: bytes,
    bits: int = 8,
    colour: int = 2,
    extra: bytes = b"",
    interlace: int = 0,
) -> bytes:
    """A hand-made PNG; `data` are the filtered rows, compressed here."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlace)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + extra
        + chunk(b"IDAT", zlib.compress(data, 9))
        + chunk(b"IEND", b"")
    )


def tiff(width: int, height: int, following: int = 0) -> bytes:
    """A grey TIFF that claims a size; its one strip is not there. `following`: its next page."""
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 9999, 277: 1, 278: height}
    tags[279] = width * height
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return (
        b"II*\x00\x08\x00\x00\x00" + struct.pack("<H", 9) + entries + struct.pack("<I", following)
    )


def webp(width: int, height: int) -> bytes:
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x10\x00\x00\x00" + canvas
    return b"RIFF" + struct.pack("<I", len(body)) + body


def many_scans() -> bytes:
    """A progressive JPEG whose scans are repeated: each is a pass over the whole image."""
    whole = save(plain(), "JPEG", progressive=True)
    start = whole.rindex(b"\xff\xda")
    return whole[:start] + whole[start:-2] * 5000 + whole[-2:]


def _turned(orientation: int) -> bytes:
    """An image that is red above blue, stored rotated, with the EXIF orientation that undoes it."""
    upright = plain()
    upright.paste(BLUE, (0, 12, 40, 24))
    back = {
        3: Image.Transpose.ROTATE_180,
        6: Image.Transpose.ROTATE_90,
        8: Image.Transpose.ROTATE_270,
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    return save(upright.transpose(back[orientation]), "PNG", exif=exif)


def _cases() -> Iterator[Good]:
    for kind in _FORMATS:
        yield Good(kind, save(plain(), kind))
    for orientation in (3, 6, 8):
        yield Good(f"turned {orientation}", _turned(orientation), colour=(127, 0, 127))
    yield Good("palette", save(plain().quantize(4), "PNG"))
    yield Good("one bit", save(plain("1", 1), "PNG"), colour=(255, 255, 255))
    yield Good("grey", save(plain("L", 100), "PNG"), colour=GREY)
    yield Good("grey JPEG", save(plain("L", 100), "JPEG"), colour=GREY)
    yield Good("grey and alpha", save(plain("LA", (0, 128)), "PNG"), colour=(127, 127, 127))
    yield Good("half clear", save(plain("RGBA", (255, 0, 0, 128)), "PNG"), colour=(255, 127, 127))
    yield Good("quite clear", save(plain("RGBA", (9, 9, 9, 0)), "PNG"), colour=(255, 255, 255))
    yield Good("half clear WebP", save(plain("RGBA", (0, 0, 0, 128)), "WEBP"), colour=(127,) * 3)
    yield Good("clear colour", save(plain(), "PNG", transparency=RED), colour=(255, 255, 255))
    yield Good("clear GIF", save(plain("P", 0), "GIF", transparency=0), colour=(255, 255, 255))
    yield Good("CMYK", save(plain("CMYK", (0, 255, 255, 0)), "JPEG"))
    yield Good("CMYK TIFF", save(plain("CMYK", (0, 255, 255, 0)), "TIFF"))
    yield Good("YCbCr TIFF", save(plain("YCbCr", (76, 85, 255)), "TIFF"))
    deep = np.full((24, 40), 100 * 257, np.uint16)
    yield Good("grey of 16 bits", save(Image.fromarray(deep), "PNG"), colour=GREY)
    yield Good("TIFF of 16 bits", save(Image.fromarray(deep), "TIFF"), colour=GREY)
    rows = (b"\x00" + b"\xff\xff\x00\x00\x00\x00" * 40) * 24
    yield Good("colour of 16 bits", png(40, 24, rows, bits=16))
    yield Good("progressive", save(plain(), "JPEG", progressive=True))
    yield Good("lossless WebP", save(plain(), "WEBP", lossless=True))
    for packing in ("tiff_lzw", "tiff_deflate", "packbits"):
        yield Good(packing, save(plain(), "TIFF", compression=packing))
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        film = {"save_all": True, "append_images": [plain(colour=BLUE)]}
        yield Good(f"animated {kind}", save(plain(), kind, **film))
    yield Good("one pixel", save(plain(size=(1, 1)), "PNG"), size=(1, 1))
    yield Good("a stripe", save(plain(size=(2000, 10)), "PNG"), size=(2000, 10))
    yield Good("rubbish behind", save(plain(), "JPEG") + b"rubbish" * 9)
    yield Good("broken EXIF", save(plain(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff"))
    yield Good("wrong orientation", save(plain(), "PNG", exif=_exif_of(77)))


def _exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _refused() -> Iterator[Bad]:
    for kind in _FORMATS:
        whole = save(noise(), kind)
        yield Bad(f"half a {kind}", whole[: len(whole) // 2], "cannot be decoded")
        yield Bad(f"head of a {kind}", whole[:20], "cannot be decoded")
    other: dict[str, bytes] = {
        "HEIC": b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic",
        "HEIC ": b"\x00\x00\x00\x18ftypmif1\x00\x00\x00\x00mif1heic",
        "AVIF": b"\x00\x00\x00\x1cftypavif\x00\x00\x00\x00avifmif1miaf",
        "AVIF ": b"\x00\x00\x00\x1cftypmif1\x00\x00\x00\x00mif1avifmiaf",
        "MP4": b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isommp41",
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><rect/></svg>',
        "SVG ": b'<?xml version="1.0"?>\n<!-- drawn -->\n<svg width="9"/>',
        "SVG  ": b"<!---->" * 99 + b" <!DOCTYPE svg>\n<svg>",
        "PDF": b"%PDF-1.7\n%\xe2\xe3",
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n(a) run",
        "JPEG XL": b"\xff\x0a\xfa\x1f",
        "JPEG 2000": b"\x00\x00\x00\x0cjP  \r\n\x87\n",
        "Photoshop": b"8BPS\x00\x01",
        "ICO": b"\x00\x00\x01\x00\x01\x00",
        "ZIP": b"PK\x03\x04\x14\x00",
        "HTML": b"<!DOCTYPE html><html>404</html>",
        "WAV": b"RIFF\x24\x00\x00\x00WAVEfmt ",
        "WebM or Matroska": b"\x1aE\xdf\xa3\x9f",
    }
    for name, content in other.items():
        yield Bad(
            name, content, rf"is in the format {name.strip()}, which this backend does not decode"
        )
    unknown = {"text": b"hello", "one byte": b"\x00", "a riff": b"RIFF1234ABCD"}
    unknown |= {"comments": b"<!---->" * 200, "a comment of SVG": b"<!-- <svg> -->"}
    for name, content in unknown.items():
        yield Bad(name, content, "is not in a known image format")


def _huge() -> Iterator[Bad]:
    claims = "that an image may have|but an image may have|a side may have at most"
    yield Bad("PNG that claims 50000 x 50000", png(50_000, 50_000, b"\x00"), claims)
    yield Bad("PNG of zeros", png(6000, 6000, bytes(6000 * 6001), colour=0), claims)
    yield Bad("GIF that claims 65535", b"GIF89a" + b"\xff" * 4 + save(plain(), "GIF")[10:], claims)
    yield Bad("WebP that claims 16384", webp(16_384, 16_384), claims)
    yield Bad("WebP that claims 2 to the 24", webp(1 << 24, 1 << 24), claims)
    jpeg = bytearray(save(plain(), "JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = b"\xff" * 4
    yield Bad("JPEG that claims 65535", bytes(jpeg), claims)
    bmp = bytearray(save(plain(), "BMP"))
    bmp[18:26] = struct.pack("<ii", 2_000_000_000, 2_000_000_000)
    yield Bad("BMP that claims two milliards", bytes(bmp), claims)
    yield Bad("TIFF that claims 60000", tiff(60_000, 60_000), claims)
    yield Bad(
        "too wide", save(plain("1", 0, (16_385, 100)), "PNG"), "a side may have at most 16384"
    )
    yield Bad("a thread", save(plain("1", 0, (16_000, 10)), "PNG"), "200 times the other")
    yield Bad("no width", png(0, 9, b""), "cannot be decoded|has no content")


def _hostile() -> Iterator[Bad]:
    broken = bytearray(save(noise(), "PNG"))
    broken[20] ^= 0xFF
    yield Bad("PNG with a false checksum", bytes(broken), "cannot be decoded")
    rows = (b"\x00" + b"\xff\x00\x00" * 40) * 24
    bomb = b"note\x00\x00" + zlib.compress(b"\x00" * (80 << 20), 9)
    yield Bad("PNG with a bomb for a note", png(40, 24, rows, extra=chunk(b"zTXt", bomb)), "cannot")
    yield Bad("PNG with too few rows", png(40, 24, rows[:99]), "cannot be decoded")
    yield Bad("PNG of colour type 9", png(40, 24, rows, colour=9), "cannot be decoded")
    yield Bad("JPEG of many scans", many_scans(), "scans, but at most 200")
    yield Bad("TIFF of floats", save(plain("F", 0.5), "TIFF"), "pixels of the kind F")
    yield Bad("TIFF of 32 bits", save(plain("I", 1 << 30), "TIFF"), "pixels of the kind I")
    yield Bad("TIFF without its strip", tiff(8, 8), "cannot be decoded")
    yield Bad("TIFF that is its own next page", tiff(8, 8, following=8), "cannot be decoded")
    yield Bad("BMP that says nothing", b"BM" + b"\x00" * 60, "cannot be decoded")
    yield Bad("GIF of no frame", b"GIF89a\x01\x00\x01\x00\x00\x00\x00;", "cannot be decoded")
    note = PngImagePlugin.PngInfo()
    note.add_text("note", "x" * (2 << 20), zip=False)
    whole = save(plain(), "PNG", pnginfo=note)
    yield Bad("PNG cut in its note", whole[: len(whole) // 2], "cannot be decoded")


GOOD: tuple[Good, ...] = tuple(_cases())
_MAKERS: tuple[Callable[[], Iterator[Bad]], ...] = (_refused, _huge, _hostile)
BAD: tuple[Bad, ...] = tuple(case for make in _MAKERS for case in make())
