"""Reads the text in the content parts of messages, in the different forms that clients send."""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import Any


def text_of(value: Any) -> str:
    """Return the text that a part of an unknown kind contains."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(text_of, value)))
    if not isinstance(value, dict):
        return ""
    if written := text_of(value.get("text") or value.get("content")):
        return written
    named, data, inner = file_of(value)
    text = text_of(inner.get("content")) or (data if inner.get("type") == "text" else _read(data))
    return f"{named}\n{text}" if named and text else text_of(text)


def file_of(value: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """Return the name and the data of a part's file, and the object that contains the data."""
    inner = next((value[at] for at in ("source", "file") if isinstance(value.get(at), dict)), value)
    data = inner.get("file_data") or inner.get("data") or inner.get("base64")
    return text_of(value.get("title") or inner.get("filename")), data, inner


def _read(data: Any) -> str:
    """Return the text of a file in base64 or in a data URI; "" if it is not text."""
    with suppress(ValueError, AttributeError, TypeError):
        text = base64.b64decode(data.partition(";base64,")[2] or data, validate=True).decode()
        return "" if "\0" in text or text.startswith("%PDF") else text
    return ""
