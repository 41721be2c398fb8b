"""Runs one download from the hub in a child process, logs progress and raises its error."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from backend.engine.errors import Cancelled, ModelNotFound, ModelRejected
from backend.engine.loading.model_reference import HubModel
from common.hub_cache import NoHome, hub_cache
from common.process_end import end_of
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
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("hub_child.py")), json.dumps(request)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,  # a Ctrl-C in a terminal is handled by the server
    )
    try:
        return _follow(child, model, cancel)
    finally:
        _end(child)


def _follow(child: Child, model: HubModel, cancel: threading.Event) -> Path:
    """Read the child's messages until its result, and log its progress."""
    name = shown(model.name)
    for line in _lines(child, cancel):
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


def _lines(child: Child, cancel: threading.Event) -> Iterator[bytes]:
    """Yield the lines that the child writes until it ends, or until `cancel` is set."""
    assert child.stdout is not None
    arrivals = select.poll()  # `select.select` accepts no descriptor above 1023
    arrivals.register(child.stdout, select.POLLIN)
    buffer = b""
    while not cancel.is_set():
        if arrivals.poll(_POLL_SECONDS * 1000):
            if not (received := os.read(child.stdout.fileno(), 65536)):
                return
            *lines, buffer = (buffer + received).split(b"\n")
            yield from lines


def _end(child: Child) -> None:
    """End the child by closing its input, or by force if it does not react."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    try:
        child.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    child.stdout.close()
