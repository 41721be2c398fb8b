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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from backend.engine.errors import Cancelled, EngineError, ModelNotFound, ModelRejected
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


@dataclass(slots=True)
class Progress:
    """Logs the progress of a download, at most every two seconds."""

    name: str
    reported: float

    def report(self, message: Mapping[str, Any]) -> None:
        if time.monotonic() - self.reported < _PROGRESS_SECONDS:
            return
        self.reported = time.monotonic()
        _log.info(
            "downloading model %s: %d of %d files, %d of %d MiB",
            shown(self.name),
            message["files"],
            message["all_files"],
            message["bytes"] // MIB,
            message["all_bytes"] // MIB,
        )


def _follow(child: Child, model: HubModel, cancel: threading.Event) -> Path:
    """Read the child's messages until its result."""
    assert child.stdout is not None
    output = child.stdout.fileno()
    arrivals = select.poll()  # `select.select` takes no descriptor above 1023
    arrivals.register(output, select.POLLIN)
    progress = Progress(model.name, time.monotonic())
    buffer = b""
    while True:
        if cancel.is_set():
            raise Cancelled(f"download of model {shown(model.name)} was cancelled")
        if not arrivals.poll(_POLL_SECONDS * 1000):
            continue
        received = os.read(output, 65536)
        if not received:
            end = end_of("the download process", child.wait(_END_SECONDS))
            raise _failure(model, {"kind": "failed", "detail": end})
        *lines, buffer = (buffer + received).split(b"\n")
        for line in lines:
            message = _decoded(line)
            if message.get("event") == "progress":
                progress.report(message)
            elif message.get("event") == "done":
                return Path(message["path"])
            elif message.get("event") == "error":
                raise _failure(model, message)


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


def _failure(model: HubModel, message: Mapping[str, Any]) -> EngineError:
    """The error for the failure that the child process reported.

    LocalAI takes some phrases (`connection refused`, for example) for a lost connection to this
    backend. So every message is written here, and no library's text is passed on.
    """
    name = shown(model.name)
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").netloc
    hub = hub.rpartition("@")[2]
    detail = message.get("detail", "")
    match message["kind"]:
        case "absent":
            return ModelNotFound(
                f"model {name}: there is no folder of this name here, and {hub} has no such"
                " repository, or it is private and HF_TOKEN does not give access"
            )
        case "gated":
            return ModelNotFound(
                f"model {name}: access to this repository must be requested on {hub}; then set"
                " HF_TOKEN to a token of that account"
            )
        case "revision":
            return ModelNotFound(
                f"model {name}: the repository has no revision {shown(model.revision or 'main')}"
            )
        case "offline":
            return ModelNotFound(
                f"model {name} is not in the cache, and downloads are turned off"
                " (HF_HUB_OFFLINE): turn them on, or give a model folder"
            )
        case "unreachable":
            return ModelNotFound(
                f"model {name} is not in the cache, and {hub} cannot be reached: check the network"
                " or HF_ENDPOINT, or give a model folder"
            )
        case "refused":
            return ModelNotFound(f"model {name}: {hub} answered with {detail}; try again later")
        case "disk_full":
            return ModelRejected(f"model {name} does not fit on the disk of the model cache")
        case "disk":
            return ModelRejected(f"model {name}: the model cache cannot be written: {detail}")
        case _:
            return ModelRejected(f"model {name}: its download failed ({detail}); try again")
