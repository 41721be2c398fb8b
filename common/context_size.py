"""Determines a model's context length from its configuration and the user's request."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

# A recurrent model has no limit of positions; its state has a fixed size.
UNBOUNDED = 1 << 20

_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "n_ctx",
    "seq_length",
)
_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config")


def context_of(config: dict[str, Any]) -> int:
    """Return the context length of a configuration, in tokens of prompt plus output.

    Families write it under different names, and multimodal families write it in the configuration
    of the language model. If positions are scaled, the configuration usually contains the scaled
    length. With YaRN it may contain the length before scaling, which is then multiplied here.
    """
    thinker = config.get("thinker_config")
    holders = (config, thinker) if isinstance(thinker, dict) else (config,)
    parts = (holder.get(name) for holder in holders for name in _LANGUAGE_PARTS)
    for part in (config, *parts):
        if isinstance(part, dict):
            lengths = (part.get(key) for key in _KEYS)
            own = next((length for length in lengths if type(length) is int and length > 0), 0)
            if own:
                return max(own, _yarn_length(part))
    return UNBOUNDED


def context_in(folder: Path) -> int:
    """Return the context length of the checkpoint in a folder; 0 if it is unknown or unlimited."""
    with suppress(OSError):
        file = folder / "config.json"
        return _context_in(file, file.stat().st_mtime_ns)
    return 0


@lru_cache(maxsize=256)
def _context_in(file: Path, _stamp: int) -> int:
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads(file.read_bytes())
        found = context_of(config) if isinstance(config, dict) else UNBOUNDED
        return 0 if found == UNBOUNDED else found
    return 0


def served_context(own: int, requested: int) -> int:
    """Return the context length with which to load a model.

    own: the model's context length.
    requested: the context length in the request; 0 if the request has none.
    """
    return min(own, requested) if requested > 0 else own


def _yarn_length(config: dict[str, Any]) -> int:
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict):
        return 0
    if "yarn" not in (scaling.get("rope_type"), scaling.get("type")):
        return 0
    factor = scaling.get("factor")
    original = scaling.get("original_max_position_embeddings")
    if type(original) is not int or not isinstance(factor, int | float) or not 1 <= factor <= 1024:
        return 0
    return int(original * factor)
