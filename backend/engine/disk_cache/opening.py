"""From a model that was just loaded to its prompt cache on disk; the engine thread."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from backend.engine.disk_cache.cache import DiskCache
from backend.engine.disk_cache.identity import model_digest
from backend.engine.disk_cache.layers import learn_layout
from backend.engine.disk_cache.use import cache_folder
from backend.engine.settings import Settings

_log = logging.getLogger(__name__)

_MIB = 1 << 20


def open_disk_cache(
    model: Any,
    checkpoint: Path,
    settings: Settings,
    *,
    dtype: str,
    kv_kind: str = "",
    adapter: str = "",
    copy: bool,
) -> DiskCache | None:
    """The cache of a loaded model; None where its KV has a form that cannot be stored.

    dtype, kv_kind and adapter as for `model_digest`; copy as for `layers.pack`. Raises
    InvalidRequest for a setting that cannot work, and nothing else.
    """
    folder = cache_folder(settings.prompt_cache_dir)
    try:
        layout = learn_layout(model)
        if layout is not None:
            identity = model_digest(checkpoint, dtype=dtype, kv_kind=kv_kind, adapter=adapter)
            max_bytes = settings.prompt_cache_disk_mib * _MIB
            return DiskCache(layout, identity, folder, max_bytes, copy=copy)
        _log.warning("prompt caches on disk are off: this model's KV has no form for a file")
    except Exception:
        _log.warning("prompt caches on disk are off for this model", exc_info=True)
    return None
