"""Finds a model of the hub in the cache, or downloads it.

The small files are downloaded and checked first, so that an unsupported repository is refused
before its weights are downloaded. Progress is logged every two seconds. A cancelled download ends
at once; complete files stay in the cache and are not downloaded again.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
from pathlib import Path

from backend.engine.errors import EngineError, Incomplete, ModelNotFound, naming
from backend.engine.loading.checkpoint import inspect, inspect_config, require_files
from backend.engine.loading.hub_process import cache_for, fetch
from backend.engine.loading.model_reference import HubModel, LocalModel, resolve
from backend.engine.loading.shards import weight_files, weight_map
from backend.engine.settings import Settings
from common.wording import shown

_log = logging.getLogger(__name__)

_SMALL_FILES = tuple("*.json *.jsonl *.txt *.jinja *.py *.model *.model.v* *.tiktoken".split())
_ALL_FILES = (
    *_SMALL_FILES,
    "model*.safetensors",
    "mtp*.safetensors",
    "mtp/*.safetensors",
    "[0-9]*_*/model.safetensors",  # a step of sentence-transformers
    "*/adapter_model.safetensors",
)


def download(
    model: HubModel, settings: Settings, cancel: threading.Event, *, drafts: bool = False
) -> Path:
    """Return the folder of a hub model, after downloading the model if necessary.

    A complete copy in the cache is used without asking the hub for a newer one.

    drafts: whether a drafter is accepted.

    Raises ModelNotFound, ModelRejected, and Cancelled soon after `cancel` is set.
    """
    flaw: EngineError | None = None
    cache = cache_for(model)
    if snapshot := _cached(model, cache):
        try:
            inspect(snapshot, model.name, settings, drafts=drafts)
            return snapshot
        except Incomplete as error:
            flaw = error
    _log.info("downloading model %s", shown(model.name))
    try:
        small = fetch(model, _SMALL_FILES, cache, cancel)
    except ModelNotFound as error:
        raise flaw or error from None
    listed = _listed(model, small, cache)
    if flaw and listed is None:  # the hub was not reached; this is the incomplete copy again
        raise flaw
    with naming(model.name):
        require_files(listed or frozenset(path.name for path in small.iterdir()))
        inspect_config(small, settings, drafts=drafts)
    exact = dataclasses.replace(model, revision=small.name)
    complete = fetch(exact, (*_ALL_FILES, *_weights(listed, small)), cache, cancel)
    _log.info("downloaded model %s", shown(model.name))
    return complete


def _cached(model: HubModel, cache: Path) -> Path | None:
    """Return the repository's folder in the cache, if it has everything that a load needs."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(
            model.repository,
            revision=model.revision or None,
            allow_patterns=list(_ALL_FILES),
            cache_dir=cache,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    folder = Path(path)
    weights = _weights(_listed(model, folder, cache), folder)
    return folder if all((folder / name).exists() for name in weights) else None


def _weights(listed: frozenset[str] | None, folder: Path) -> frozenset[str]:
    """Return the names of a repository's weight files, including unusual names.

    listed: all files of the repository; None if unknown.
    """
    listed = listed or frozenset()
    return listed & {*weight_map(folder).values(), *weight_files(listed)}


def _listed(model: HubModel, snapshot: Path, cache: Path) -> frozenset[str] | None:
    """Return the names of all files of a repository; None if the hub has never listed them."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(model.repository, revision=snapshot.name, cache_dir=cache)
    except CachedRepoTreeNotFoundError:
        return None
    return frozenset(file.path for file in tree)


def main(reference: str) -> int:
    """Download the model that a reference names, and print its folder. Progress goes to stderr."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        model = resolve(reference)
        if isinstance(model, LocalModel):
            print(model.path)
        else:
            print(download(model, Settings(), threading.Event()))
    except EngineError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
