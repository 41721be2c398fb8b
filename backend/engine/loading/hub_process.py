"""Runs one download from the hub in a child process, logs progress and raises its error."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from pathlib import Path

from backend.engine.errors import Cancelled, ModelNotFound, ModelRejected
from backend.engine.loading.model_reference import HubModel
from common.hub_cache import NoHome, hub_cache
from common.process_end import end_of, wait_or_kill
from common.wording import shown

_log = logging.getLogger(__name__)

Child = subprocess.Popen[bytes]

_POLL_SECONDS = 0.1
_END_SECONDS = 5.0


def cache_for(model: HubModel) -> Path:
    """Return the hub's cache folder, for a download of the model. Raises ModelRejected."""
    try:
        return hub_cache()
    except NoHome as why:
        raise ModelRejected.because(model.name, str(why)) from None


def fetch(model: HubModel, patterns: tuple[str, ...], cache: Path, cancel: threading.Event) -> Path:
    """Download the matching files of a repository; returns their folder.

    Raises ModelNotFound, ModelRejected, and Cancelled soon after `cancel` is set.
    """
    request = {
        "repository": model.repository,
        "revision": model.revision,
        "allow_patterns": patterns,
        "cache_dir": str(cache),
    }
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("hub_child.py")), json.dumps(request)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,  # a Ctrl-C in a terminal is handled by the server
    ) as child:
        watch = threading.Thread(target=_watch, args=(child, cancel))
        watch.start()
        try:
            return _follow(child, model, cancel)
        finally:
            _end(child)
            watch.join()


def _follow(child: Child, model: HubModel, cancel: threading.Event) -> Path:
    name = shown(model.name)
    assert child.stdout is not None
    for line in child.stdout:
        try:
            message = json.loads(line)
            known = isinstance(message, dict)
        except ValueError:
            known = False
        if not known:  # written by a library
            _log.debug("download: %s", line.decode(errors="replace"))
        elif "path" in message:
            return Path(message["path"])
        elif "error" in message:
            kind = ModelNotFound if message["absent"] else ModelRejected
            raise kind(f"model {name}{message['error']}")
        else:
            _log.info("downloading model %s: %s", name, message["progress"])
    if cancel.is_set():
        raise Cancelled(f"download of model {name} was cancelled")
    end = end_of("the download process", child.wait(_END_SECONDS))
    raise ModelRejected(f"model {name}: its download failed ({end}); try again")


def _watch(child: Child, cancel: threading.Event) -> None:
    """End the child when `cancel` is set; return when the child has ended."""
    while child.poll() is None and not cancel.wait(_POLL_SECONDS):
        pass
    _end(child)


def _end(child: Child) -> None:
    """End the child by closing its input, or by force if it does not react."""
    assert child.stdin is not None
    child.stdin.close()
    wait_or_kill(child, _END_SECONDS)
