"""Recognises file formats by their first bytes; media types and file names are ignored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from backend.engine.media.items import BadItem

# Atomic, because the time to try all ways of dividing a text into comments is exponential.
_SVG = re.compile(rb"(?:\s|<\?xml[^>]*>|<!DOCTYPE[^>]*>|(?><!--.*?-->))*+<svg[\s>]", re.S | re.I)
_HTML = re.compile(rb"\s*<(?:!doctype html|html)", re.I)
_LOOKED_AT = 1024

_BEGINNINGS: Mapping[str, tuple[bytes, ...]] = {
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "JPEG": (b"\xff\xd8\xff",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "TIFF": (b"II*\x00", b"MM\x00*"),
    "BigTIFF": (b"II+\x00", b"MM\x00+"),
    "ICO": (b"\x00\x00\x01\x00",),
    "Photoshop": (b"8BPS",),
    "JPEG XL": (b"\xff\x0a", b"\x00\x00\x00\x0cJXL "),
    "JPEG 2000": (b"\x00\x00\x00\x0cjP  ",),
    "QOI": (b"qoif",),
    "PDF": (b"%PDF",),
    "PostScript": (b"%!PS",),
    "ZIP": (b"PK\x03\x04",),
    "gzip": (b"\x1f\x8b",),
    "FLAC": (b"fLaC",),
    "OGG": (b"OggS",),
    "MP3": (b"ID3",),
    "AMR": (b"#!AMR",),
    "CAF": (b"caff",),
    "WMA": (b"0&\xb2u\x8ef\xcf\x11",),
    "AAC": (b"ADIF",),
    "WAV": (b"RF64",),
    "WebM or Matroska": (b"\x1aE\xdf\xa3",),
    "FLV": (b"FLV\x01",),
    "MPEG": (b"\x00\x00\x01\xba", b"\x00\x00\x01\xb3"),
}
_INNER = {
    b"RIFF": {b"WAVE": "WAV", b"WEBP": "WebP", b"AVI ": "AVI"},
    b"FORM": {b"AIFF": "AIFF", b"AIFC": "AIFF"},
}
_BRANDS = {
    b"avif": "AVIF",
    b"avis": "AVIF",
    **dict.fromkeys(
        (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"
    ),
    b"M4A ": "M4A",
    b"M4B ": "M4A",
    b"qt  ": "QuickTime",
}


def kind_of(content: bytes) -> str | None:
    """Return the common name of a file's format; None if it is unknown."""
    for name, beginnings in _BEGINNINGS.items():
        if content.startswith(beginnings):
            return name
    if inner := _INNER.get(content[:4]):
        return inner.get(content[8:12])
    if content[4:8] == b"ftyp":
        return _of_brands(content)
    head = content[:_LOOKED_AT]
    if _SVG.match(head):
        return "SVG"
    return "HTML" if _HTML.match(head) else _of_frame(content)


def require_format(content: bytes, noun: str, decoded: Sequence[str]) -> str:
    """Return the format of a file. Raises BadItem if the format is not in `decoded`.

    noun: what the file should be, such as `image`.
    """
    name = kind_of(content)
    choice = f"send {', '.join(decoded[:-1])} or {decoded[-1]}"
    if name is None:
        raise BadItem(f"is not in a known {noun} format: {choice}")
    if name not in decoded:
        raise BadItem(f"is in the format {name}, which this backend does not decode: {choice}")
    return name


def _of_brands(content: bytes) -> str:
    """Return the format of an ISO base media file, by its first specific brand.

    General brands are skipped, such as mif1, which several formats use as their major brand.
    """
    length = min(int.from_bytes(content[:4], "big"), 256)
    brands = [content[8:12], *(content[at : at + 4] for at in range(16, length, 4))]
    if b"avif" in brands:
        return _BRANDS[b"avif"]
    return next((_BRANDS[brand] for brand in brands if brand in _BRANDS), "MP4")


def _of_frame(content: bytes) -> str | None:
    """Return the format of a file that begins with an MPEG audio frame; None for other files.

    Such a frame begins with eleven set bits. The layer after them is 0 for AAC.
    """
    if len(content) < 4 or content[0] != 0xFF or content[1] & 0xE0 != 0xE0:
        return None
    if content[1] & 0xF6 == 0xF0:
        return "AAC"
    layer, bit_rate, sample_rate = content[1] & 6, content[2] >> 4, content[2] >> 2 & 3
    return "MP3" if layer and bit_rate != 15 and sample_rate != 3 else None
