"""Reads the JSON files of a model's folder, with errors that name the file and its fault.

The libraries that read these files later report a broken file by the position of a character, by a
Python exception, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from backend.engine.errors import Unusable
from common.wording import json_fault

OF_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
OF_MEDIA = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
TEMPLATE = "chat_template.jinja"


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises Unusable, OSError."""
    try:
        value = json.loads(_text(path, "valid JSON"))
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{path.name} is not valid JSON: {json_fault(error)}") from None
    if not isinstance(value, dict):
        raise Unusable(f"{path.name} is not a JSON object")
    return value


def first_fault(folder: Path, names: Iterable[str]) -> str:
    """Return a clause for a message about the first broken file; '' if no file is broken.

    Callers ask only after a load has failed, because not every broken file makes a load fail.
    """
    for path in (folder / name for name in names):
        try:
            if path.suffix != ".json" and path.is_file():
                _text(path, "a chat template")
            elif path.is_file():
                read_object(path)
        except Unusable as error:
            return error.message
    return ""


def _text(path: Path, kind: str) -> str:
    content = path.read_bytes()
    if not content.strip():
        raise Unusable(f"{path.name} is not {kind}: it is empty")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Unusable(f"{path.name} is not {kind}: it is not UTF-8 text") from None
