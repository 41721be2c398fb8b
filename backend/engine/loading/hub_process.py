"""One download from the hub: the child process, its messages, and the error if it fails."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from backend.engine.errors import Cancelled, ModelNotFound, ModelRejected
from backend.engine.loading.model_reference import HubModel
from backend.engine.units import MIB
from common.hub_cache import NoHome, hub_cache
from common.process_end import end_of
from common.wording import shown

_log = logging.getLogger(__name__)

Child = subprocess.Popen[bytes]

_POLL_SECONDS = 0.1
_PROGRESS_SECONDS = 2.0
_END_SECONDS = 5.0


def cache_for(model: HubModel) -> Path:
    """The folder for its download. Raises ModelRejected."""
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
        "patterns": list(patterns),
        "cache": str(cache),
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
    """Read the child's messages until its result; log progress, at most every two seconds."""
    assert child.stdout is not None
    name, output = shown(model.name), child.stdout.fileno()
    arrivals = select.poll()  # `select.select` accepts no descriptor above 1023
    arrivals.register(output, select.POLLIN)
    reported = time.monotonic()
    buffer = b""
    while True:
        if cancel.is_set():
            raise Cancelled(f"download of model {name} was cancelled")
        if not arrivals.poll(_POLL_SECONDS * 1000):
            continue
        received = os.read(output, 65536)
        if not received:
            end = end_of("the download process", child.wait(_END_SECONDS))
            raise ModelRejected(f"model {name}: its download failed ({end}); try again")
        *lines, buffer = (buffer + received).split(b"\n")
        for message in map(_decoded, lines):
            if "path" in message:
                return Path(message["path"])
            if "error" in message:
                kind = ModelNotFound if message["absent"] else ModelRejected
                raise kind(f"model {name}{message['error']}")
            if "files" in message and time.monotonic() - reported >= _PROGRESS_SECONDS:
                reported = time.monotonic()
                mib = [size // MIB for size in message["bytes"]]
                _log.info(
                    "downloading model %s: %d of %d files, %d of %d MiB",
                    name,
                    *message["files"],
                    *mib,
                )


def _decoded(line: bytes) -> dict[str, Any]:
    """A message of the child; other lines come from libraries and go to the debug log."""
    try:
        message = json.loads(line)
        if isinstance(message, dict):
            return message
    except ValueError:
        pass
    _log.debug("download: %s", line.decode(errors="replace"))
    return {}


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
