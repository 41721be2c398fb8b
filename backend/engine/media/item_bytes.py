"""Reads the bytes of a file from an item's string on the wire.

Hosts send bare base64, a client's data URI, or an absolute path if the host stores files on this
machine. Nothing is ever downloaded. Bare base64 of a JPEG begins with a slash, like a path, so a
string is a path only if it is not base64 of a file in a known format.
"""

from __future__ import annotations

import binascii
import os
import re
import stat

from backend.engine.media.items import BadItem
from backend.engine.media.kinds import kind_of

_BLANKS = " \t\r\n\v\f"
_BLANK = str.maketrans("", "", _BLANKS)
_TO_STANDARD = str.maketrans("-_", "+/")
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_NO_DIGIT = re.compile(r"[^A-Za-z0-9+/]")
_SLICE = 1 << 20  # characters
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20}):")
_LONGEST_PATH = 4096
_HEADER = 64  # characters of base64 that are enough to recognise a file format


def item_bytes(text: str, most: int, *, allow_paths: bool) -> bytes:
    """Return the bytes of an item, at most `most`. Raises BadItem."""
    start = text[:_LONGEST_PATH].lstrip()
    if not start:
        raise BadItem("is empty: send base64 or a data URI")
    if start[:5].lower() == "data:":
        return _of_data_uri(text, most)
    if scheme := _SCHEME.match(start):
        raise BadItem(
            f"is a URL of the scheme {scheme[1].lower()!r}, but this backend downloads nothing:"
            " send the content in base64"
        )
    if start[0] == "/" and not _begins_a_known_file(start):
        return _of_path(text.strip(), most, allow_paths)
    return _of_base64(text, most)


def _begins_a_known_file(start: str) -> bool:
    digits = start.translate(_BLANK)[:_HEADER]
    if not _BASE64.fullmatch(digits):
        return False
    return kind_of(binascii.a2b_base64(digits[: len(digits) // 4 * 4])) is not None


def _of_data_uri(text: str, most: int) -> bytes:
    """Return the bytes in a data URI.

    The media type is ignored, because hosts write image/png for every format.
    """
    label, comma, payload = text.partition(",")
    if not comma:
        raise BadItem("is a data URI without a comma before its data")
    if not label.rstrip().lower().endswith(";base64"):
        content = _unquoted(payload)
        _require_size(len(content), most)
        return content
    if "%" in payload:
        payload = _unquoted(payload).decode("latin-1")
    return _of_base64(payload, most)


def _unquoted(text: str) -> bytes:
    """Decode escapes such as `%2B`; `urllib` would take a microsecond for every other `%` too."""
    return _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()), text.encode())


def _of_base64(text: str, most: int) -> bytes:
    """Decode slices, because one call for many MiB would block all other threads."""
    body = text.rstrip(_BLANKS + "=")
    if not body:
        raise BadItem("is neither base64 nor a data URI: it has no data")
    _require_size((len(body) - sum(map(body.count, _BLANKS))) * 3 // 4, most)
    decoded, left, count = bytearray(), "", 0
    for start in range(0, len(body), _SLICE):
        digits = body[start : start + _SLICE].translate(_BLANK).translate(_TO_STANDARD)
        if other := _NO_DIGIT.search(digits):
            position = count + other.start() + 1
            raise BadItem(
                f"is neither base64 nor a data URI: its character {position} is {other[0]!r}"
            )
        count += len(digits)
        left += digits
        whole = len(left) // 4 * 4
        decoded += binascii.a2b_base64(left[:whole])
        left = left[whole:]
    if len(left) == 1:
        raise BadItem(f"is not base64: {count} digits are one too many or too few")
    return bytes(decoded + binascii.a2b_base64(left + "=" * (-len(left) % 4)))


def _of_path(path: str, most: int, allow_paths: bool) -> bytes:
    if not allow_paths:
        raise BadItem(
            "is a path or not base64: send the content in base64 or as a data URI; paths are"
            " accepted only if the model is loaded with the option allow_media_paths"
        )
    try:
        # If the path is a pipe or a terminal, the call must not wait for the other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise BadItem("is a path, but not of a regular file")
            _require_size(found.st_size, most)
            content = file.read(most + 1)
    except (OSError, ValueError):
        raise BadItem(
            "is a path, but not of a readable file: check the path and its permissions"
        ) from None
    _require_size(len(content), most)
    return content


def _require_size(size: int, most: int) -> None:
    if size > most:
        raise BadItem(
            f"has {size} bytes, but at most {most} are allowed: send a smaller file, or load the"
            " model with a larger max_media_mib"
        )
