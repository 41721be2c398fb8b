"""The JSON files of a model's folder, read so that an error names the file and what is wrong in it.

The libraries that read these files later report a broken one by the position of a character, by an
error of Python, or not at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.wording import json_fault

OF_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
OF_TEXT = ("generation_config.json", *OF_TOKENIZER)
OF_MEDIA = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
TEMPLATE = "chat_template.jinja"


class BadFileError(Exception):
    """A file cannot be used: a clause for the message to the user."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises BadFileError, OSError."""
    try:
        value = json.loads(_text(path, "valid JSON"))
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{path.name} is not valid JSON: {json_fault(error)}") from None
    if not isinstance(value, dict):
        raise BadFileError(f"{path.name} is not a JSON object")
    return value


def require_readable(folder: Path, *, media: bool) -> None:
    """Check the small text files that are read for a model. Raises BadFileError, OSError.

    media: whether it is loaded with the encoders for images or sounds.
    """
    for name in OF_TEXT + (OF_MEDIA if media else ()):
        if (path := folder / name).is_file():
            read_object(path)
    if (path := folder / TEMPLATE).is_file():
        _text(path, "a chat template")


def _text(path: Path, kind: str) -> str:
    content = path.read_bytes()
    if not content.strip():
        raise BadFileError(f"{path.name} is not {kind}: it is empty")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise BadFileError(f"{path.name} is not {kind}: it is not UTF-8 text") from None
    if text.startswith("\ufeff"):
        raise BadFileError(
            f"{path.name} is not {kind}: it begins with a byte order mark; save it without one"
        )
    return text
