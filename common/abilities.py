"""Determines the abilities of a model from the files of its checkpoint, without loading it.

Lists of models contain the abilities, so that clients know whether to offer images, tools or code
completion. The names of the abilities are Ollama's.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from common.chat_format import ChatFormat
from common.infill_tokens import FAMILIES
from common.media_parts import has_audio, has_media, has_vision
from common.model_kind import ModelKind, kind_of, with_model_type
from common.template_files import IN_TEXT, OF_PROCESSORS, OF_TOKENIZER, template_in

_INDEX = "model.safetensors.index.json"
_FILES = ("config.json", "tokenizer.json", OF_TOKENIZER, *OF_PROCESSORS, IN_TEXT[0], _INDEX)
_LARGEST = 64 << 20  # maximum number of bytes that are read of one file
_HEAD = 1 << 20  # bytes of tokenizer.json that hold its added tokens
_ADDED = '"added_tokens":'
_UNKNOWN = ("completion", "tools")
# Anthropic's names of what a model may be capable of, and the ability that each needs, if any.
_CAPABILITIES = dict.fromkeys(
    "batch citations code_execution context_management pdf_input server_tools".split()
) | {
    "effort": "thinking",
    "image_input": "vision",
    "structured_outputs": "completion",
    "thinking": "thinking",
}
_PARTS = {
    "effort": ("low", "medium", "high", "max"),
    "server_tools": ("code_execution", "web_search"),
}
_THINKING = ("adaptive", "between_tools", "disabled", "enabled")
_OF_KIND = {
    ModelKind.TEXT: ("completion",),
    ModelKind.EMBEDDING: ("embedding",),
    ModelKind.TRANSCRIBE: ("audio",),
}


def abilities(folder: Path, wanted: str = "") -> tuple[str, ...]:
    """Return the abilities of a checkpoint; empty for rerankers and classifiers.

    The abilities are completion, tools, insert, vision, audio, thinking and embedding. Before a
    download, a model is assumed to have completion and tools, unless `wanted` says otherwise.

    wanted: the option `type`; "" if it is not set.
    """
    stamps = [(path.stat().st_mtime_ns if path.is_file() else 0) for path in _paths(folder)]
    return _abilities(folder, wanted, tuple(stamps))


def text_only(folder: Path, wanted: str = "") -> bool:
    """Return whether a checkpoint certainly has no vision or audio weights.

    wanted: the option `type`; "" if it is not set.
    """
    if wanted == "text":
        return True
    with suppress(OSError):
        index = folder / _INDEX
        files = [index] if index.is_file() else list(folder.glob("*.safetensors"))
        return len(files) == 1 and _without_media(folder, files[0].stat().st_mtime_ns)
    return False


@lru_cache(maxsize=256)
def _without_media(folder: Path, _stamp: int) -> bool:
    with suppress(OSError, ValueError, RecursionError):
        tensors = _tensors(folder)
        return bool(tensors) and not has_media(tensors)
    return False


def for_anthropic(supported: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return abilities as the `capabilities` of a model in Anthropic's API."""
    listed: dict[str, dict[str, Any]] = {}
    for name, need in _CAPABILITIES.items():
        support = {"supported": need in supported}
        listed[name] = {**support, **dict.fromkeys(_PARTS.get(name, ()), support)}
        if name == "thinking":
            listed[name]["types"] = dict.fromkeys(_THINKING, support)
    return listed


def _paths(folder: Path) -> list[Path]:
    return [folder / name for name in _FILES]


@lru_cache(maxsize=256)
def _abilities(folder: Path, wanted: str, _stamps: tuple[int, ...]) -> tuple[str, ...]:
    config = with_model_type(_json(folder / "config.json"))
    with suppress(OSError, ValueError, TypeError, RecursionError):
        if "model_type" not in config and wanted in ("", "text", "vision"):
            return _UNKNOWN
        names = frozenset(path.name for path in folder.iterdir()) if config else frozenset()
        kind = kind_of(config, names, "" if wanted == "vision" else wanted)
        if kind is not ModelKind.TEXT:
            return _OF_KIND.get(kind, ())
        tensors = () if wanted == "text" else _tensors(folder)
        added = _added_tokens(folder / "tokenizer.json")
        template = _template(folder)
        can = {
            "tools": bool(template) or "tekken.json" in names,
            "insert": any({each.prefix, each.suffix} <= added for each in FAMILIES),
            "vision": has_vision(tensors),
            "audio": has_audio(tensors),
            "thinking": ChatFormat.detect(template, added).thinks,
        }
        return ("completion", *(word for word, true in can.items() if true))
    return _UNKNOWN


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
        found = json.loads(file.read(_LARGEST))
        return found if isinstance(found, dict) else {}
    return {}


def _tensors(folder: Path) -> frozenset[str]:
    """Return the names of the weights, from the index or from the header of the only file."""
    indexed = _json(folder / _INDEX).get("weight_map")
    if isinstance(indexed, dict):
        return frozenset(indexed)
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return frozenset(json.loads(file.read(min(length, _LARGEST))))
    return frozenset()


def _added_tokens(path: Path) -> frozenset[str]:
    """Return the added tokens, which tokenizer.json lists at its beginning."""
    with suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
        head = file.read(_HEAD).decode(errors="replace")
        start = head.index(_ADDED) + len(_ADDED)
        listed, _ = json.JSONDecoder().raw_decode(head[start:].lstrip())
        return frozenset(str(token["content"]) for token in listed)
    return frozenset()


def _template(folder: Path) -> str:
    """Return the text of all chat templates of a checkpoint."""
    with suppress(OSError, ValueError):
        files = (file for pattern in IN_TEXT for file in folder.glob(pattern))
        if texts := [file.read_text("utf-8") for file in files]:
            return "\n".join(texts)
    stated = (template_in(_json(folder / name)) for name in (OF_TOKENIZER, *OF_PROCESSORS))
    found = next(filter(None, stated), "")
    return found if isinstance(found, str) else "\n".join(found.values())
