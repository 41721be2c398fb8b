"""Checks the images, videos and audio of a request, and converts them to data URIs.

A path must never reach a backend, which reads files by path, and some paths are valid base64. So
everything is decoded, recognised by its first bytes, and encoded again. Fetching by URL is in
`gateway.remote_images`, and off unless the gateway's operator turns it on.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence

from gateway.errors import ApiError
from gateway.remote_images import PUBLIC, Fetched, Fetcher, invalid, too_large
from gateway.settings import GatewaySettings
from gateway.threads import offload

Signature = tuple[str, Callable[[bytes], bool]]
_IMAGES: Sequence[Signature] = (
    ("image/png", lambda head: head.startswith(b"\x89PNG\r\n\x1a\n")),
    ("image/jpeg", lambda head: head.startswith(b"\xff\xd8\xff")),
    ("image/gif", lambda head: head.startswith((b"GIF87a", b"GIF89a"))),
    ("image/webp", lambda head: head[:4] == b"RIFF" and head[8:12] == b"WEBP"),
    ("image/bmp", lambda head: head.startswith(b"BM")),
)
_STILLS = (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1")
_VIDEOS: Sequence[Signature] = (
    ("video/mp4", lambda head: head[4:8] == b"ftyp" and head[8:12] not in _STILLS),
    ("video/webm", lambda head: head.startswith(b"\x1a\x45\xdf\xa3")),  # and Matroska
    ("video/x-msvideo", lambda head: head[:4] == b"RIFF" and head[8:12] == b"AVI "),
)
_KNOWN: Mapping[Fetched, tuple[Sequence[Signature], str]] = {
    "image": (_IMAGES, "PNG, JPEG, GIF, WebP or BMP"),
    "video": ((*_VIDEOS, _IMAGES[2]), "MP4, WebM, Matroska, AVI or GIF"),
}
_AUDIOS: Sequence[Signature] = (
    ("audio/wav", lambda head: head[:4] == b"RIFF" and head[8:12] == b"WAVE"),
    ("audio/mpeg", lambda head: head[:3] == b"ID3" or (head[:1] == b"\xff" and head[1] >= 0xE0)),
)
PDF = "application/pdf"
_PDFS: Sequence[Signature] = ((PDF, lambda head: head.lstrip().startswith(b"%PDF-")),)
_FORMATS = {"wav": "audio/wav", "mp3": "audio/mpeg"}
MOST_REMOTE = 16  # for one request: as many as backends accept by default
_LONG = 1 << 18  # bytes of content that takes milliseconds to decode and encode
_HEAD = 16  # enough bytes to recognise a format


def is_remote(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def type_of(data: object) -> str:
    """Return the media type by the first bytes of base64 or a data URI; "" if none is known."""
    if not isinstance(data, str):
        return ""
    text = data.partition(",")[2] if data[:5].lower() == "data:" else data
    digits = "".join(text[: 4 * _HEAD].split())[: _HEAD // 3 * 4]
    try:
        head = base64.b64decode(digits, validate=True)
    except (binascii.Error, ValueError):
        return ""
    return _kind(head, (*_IMAGES, *_VIDEOS, *_AUDIOS, *_PDFS)) or ""


async def media(
    url: str, settings: GatewaySettings, what: Fetched = "image", fetcher: Fetcher = PUBLIC
) -> str:
    """Return the image or video of a part (data URI, bare base64 or http URL) as a data URI.

    Raises ApiError 400 or 413 without `param`: only the caller knows where the part is.
    """
    known, names = _KNOWN[what]
    refusal = invalid(what, f"this is not a known kind of {what}: send {names}")
    content: str | bytes = url
    if is_remote(url):
        if not settings.allow_remote_images:
            raise invalid(
                "image",
                f"{what}s are not fetched from URLs here: send a data URI, or start the gateway"
                " with --allow-remote-images",
            )
        content = await fetcher.fetch(url, settings.max_image_bytes, what)
    return await _converted(content, settings, f"the {what}", known, refusal)


async def audio(data: str, form: str, settings: GatewaySettings) -> str:
    """Return the audio of an input_audio part (base64; `form` is wav or mp3), as `media` does."""
    known = [each for each in _AUDIOS if each[0] == _FORMATS.get(form, each[0])]
    sentence = f"this is not {form[:10]} audio: send base64 of a WAV or MP3 file, and its format"
    return await _converted(data, settings, "the audio", known, invalid("audio", sentence))


async def _converted(
    content: str | bytes,
    settings: GatewaySettings,
    what: str,
    known: Sequence[Signature],
    refusal: ApiError,
) -> str:
    """Return content of a known kind as a data URI. Raises `refusal` for any other content."""

    def convert() -> str:
        raw = content
        if isinstance(raw, str):
            raw = _decoded(raw, settings.max_image_bytes, what)
        if (kind := _kind(raw, known)) is None:
            raise refusal
        return f"data:{kind};base64,{base64.b64encode(raw).decode()}"

    return await offload(convert) if len(content) > _LONG else convert()


def _decoded(text: str, largest: int, what: str) -> bytes:
    """Return the bytes of a base64 data URI, or of base64 alone."""
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise invalid("image", f"{what} is not a base64 data URI: send data:…;base64,…")
    # Base64 from mail programs and shells often contains line breaks.
    compact = "".join(text.split())
    if len(compact) // 4 * 3 > largest + 2:
        raise too_large(largest, what)
    try:
        content = base64.b64decode(compact, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(
            "image", f"{what} is neither base64 nor a data URI: send one of them"
        ) from None
    if not content:
        raise invalid("image", f"{what} is empty")
    if len(content) > largest:
        raise too_large(largest, what)
    return content


def _kind(content: bytes, known: Sequence[Signature]) -> str | None:
    head = content[:_HEAD].ljust(_HEAD, b"\0")
    return next((kind for kind, matches in known if matches(head)), None)
