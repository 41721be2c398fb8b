"""Which file some bytes are, by how they begin: labels and names are not believed."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SVG = re.compile(
    rb"\s*(?:<\?xml[^>]*>\s*|<!--.*?-->\s*|<!DOCTYPE[^>]*>\s*)*<svg[\s>]", re.S | re.I
)
_HTML = re.compile(rb"\s*<(?:!doctype html|html)", re.I)
_LOOKED_AT = 1024


@dataclass(frozen=True, slots=True)
class Kind:
    """name: as people know it. medium: image, sound, video or document."""

    name: str
    medium: str


def _image(name: str) -> Kind:
    return Kind(name, "image")


def _sound(name: str) -> Kind:
    return Kind(name, "sound")


def _video(name: str) -> Kind:
    return Kind(name, "video")


def _document(name: str) -> Kind:
    return Kind(name, "document")


_BEGINNINGS: tuple[tuple[bytes, Kind], ...] = (
    (b"\x89PNG\r\n\x1a\n", _image("PNG")),
    (b"\xff\xd8\xff", _image("JPEG")),
    (b"GIF87a", _image("GIF")),
    (b"GIF89a", _image("GIF")),
    (b"BM", _image("BMP")),
    (b"II*\x00", _image("TIFF")),
    (b"MM\x00*", _image("TIFF")),
    (b"II+\x00", _image("BigTIFF")),
    (b"MM\x00+", _image("BigTIFF")),
    (b"\x00\x00\x01\x00", _image("ICO")),
    (b"8BPS", _image("Photoshop")),
    (b"\xff\x0a", _image("JPEG XL")),
    (b"\x00\x00\x00\x0cJXL ", _image("JPEG XL")),
    (b"\x00\x00\x00\x0cjP  ", _image("JPEG 2000")),
    (b"qoif", _image("QOI")),
    (b"%PDF", _document("PDF")),
    (b"%!PS", _document("PostScript")),
    (b"PK\x03\x04", _document("ZIP")),
    (b"\x1f\x8b", _document("gzip")),
    (b"fLaC", _sound("FLAC")),
    (b"OggS", _sound("OGG")),
    (b"ID3", _sound("MP3")),
    (b"#!AMR", _sound("AMR")),
    (b"caff", _sound("CAF")),
    (b"0&\xb2u\x8ef\xcf\x11", _sound("WMA")),
    (b"ADIF", _sound("AAC")),
    (b"RF64", _sound("WAV")),
    (b"\x1aE\xdf\xa3", _video("WebM or Matroska")),
    (b"FLV\x01", _video("FLV")),
    (b"\x00\x00\x01\xba", _video("MPEG")),
    (b"\x00\x00\x01\xb3", _video("MPEG")),
)
_RIFF = {b"WAVE": _sound("WAV"), b"WEBP": _image("WebP"), b"AVI ": _video("AVI")}
_FORM = {b"AIFF": _sound("AIFF"), b"AIFC": _sound("AIFF")}
_BRANDS = {
    b"avif": _image("AVIF"),
    b"avis": _image("AVIF"),
    **dict.fromkeys(
        (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), _image("HEIC")
    ),
    b"M4A ": _sound("M4A"),
    b"M4B ": _sound("M4A"),
    b"qt  ": _video("QuickTime"),
}


def kind_of(content: bytes) -> Kind | None:
    """The kind of a file from its first bytes, or None where no known file begins so."""
    for beginning, kind in _BEGINNINGS:
        if content.startswith(beginning):
            return kind
    inner = content[8:12]
    if content.startswith(b"RIFF"):
        return _RIFF.get(inner)
    if content.startswith(b"FORM"):
        return _FORM.get(inner)
    if content[4:8] == b"ftyp":
        return _of_brands(content)
    head = content[:_LOOKED_AT]
    if _SVG.match(head):
        return _image("SVG")
    if _HTML.match(head):
        return _document("HTML")
    return _of_frame(content)


def _of_brands(content: bytes) -> Kind:
    """ISO base media: the major brand says it, unless it is a general one such as mif1."""
    length = min(int.from_bytes(content[:4], "big"), 256)
    brands = [content[8:12], *(content[at : at + 4] for at in range(16, length, 4))]
    if b"avif" in brands:
        return _BRANDS[b"avif"]
    return next((_BRANDS[brand] for brand in brands if brand in _BRANDS), _video("MP4"))


def _of_frame(content: bytes) -> Kind | None:
    """MPEG audio without a header: eleven set bits, then a layer; AAC uses the layer 0."""
    if len(content) < 4 or content[0] != 0xFF or content[1] & 0xE0 != 0xE0:
        return None
    if content[1] & 0xF6 == 0xF0:
        return _sound("AAC")
    layer, bit_rate, sample_rate = content[1] & 6, content[2] >> 4, content[2] >> 2 & 3
    return _sound("MP3") if layer and bit_rate != 15 and sample_rate != 3 else None
