"""The program that downloads one repository from the hub, run as a child process.

A download inside the server could not be cancelled, because the hub's client blocks as long as a
connection is silent. A child process can be ended at any moment. This process ends itself when its
standard input closes, so it never outlives the server. It writes JSON lines to standard output:
progress, then one result or one error.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_REPORT_SECONDS = 2.0
_MIB = 1 << 20
# Bytes per read. With the hub client's 10 MiB, a slow connection seems to make no progress.
_CHUNK_BYTES = 1 << 20
_OPENING_SECONDS = 0.05

_ending = threading.Event()
_partial: list[Path] = []


def main() -> None:
    """Download the repository that the first argument, a JSON object, describes."""
    # The folder of this file comes first on the path and would hide other packages' modules.
    del sys.path[0]
    request = json.loads(sys.argv[1])
    sys.addaudithook(_note_partial)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        _say(path=_fetch(**request))
    except BaseException as error:  # any error must be reported to the parent
        absent, text = _described(error, request["revision"])
        _say(absent=absent, error=text)
    _remove_partial()
    os._exit(0)  # the parent waits, and the end of an interpreter with these libraries takes long


def _fetch(repository: str, revision: str, allow_patterns: list[str], cache_dir: str) -> str:
    from huggingface_hub import constants, snapshot_download
    from tqdm import tqdm  # type: ignore[import-untyped]

    bars: list[Any] = []

    class Bar(tqdm):  # type: ignore[misc]
        """A progress bar that counts, but draws nothing."""

        def __init__(self, *args: Any, **options: Any) -> None:
            quiet = {"file": open(os.devnull, "w"), "disable": False}  # noqa: PTH123, SIM115
            super().__init__(*args, **options | quiet)
            bars.append(self)

    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
    threading.Thread(target=_report, args=(bars,), daemon=True).start()
    path: str = snapshot_download(
        repository,
        revision=revision or None,
        allow_patterns=allow_patterns,
        cache_dir=cache_dir,
        tqdm_class=Bar,
    )
    return path


def _report(bars: list[Any]) -> None:
    """Report progress. One bar counts bytes that arrive, another bytes that reach the disk."""
    while True:
        time.sleep(_REPORT_SECONDS)
        in_bytes = [bar for bar in bars if bar.unit == "B"]
        in_files = [bar for bar in bars if bar.unit != "B"]
        if in_bytes and in_files:
            files = in_files[-1]
            arrived, total = max(bar.n for bar in in_bytes), min(bar.total for bar in in_bytes)
            _say(
                progress=f"{files.n:.0f} of {files.total or 0:.0f} files,"
                f" {arrived // _MIB:.0f} of {total // _MIB:.0f} MiB"
            )


def _described(error: BaseException, revision: str) -> tuple[bool, str]:
    """Return whether a failure means that the model does not exist, and a message for the user.

    The message continues the model's name. No library's message is passed on, because LocalAI
    interprets some phrases (`connection refused`, for example) as a lost connection to this
    backend.
    """
    from huggingface_hub import errors
    from huggingface_hub.constants import is_offline_mode

    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").netloc
    hub = hub.rpartition("@")[2]
    cause = error.__cause__ or error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    of_network = any(kind.__name__ == "TransportError" for kind in type(cause).__mro__)
    not_cached = " is not in the cache, and "
    if isinstance(error, errors.GatedRepoError):
        return True, (
            f": access to this repository must be requested on {hub}; then set HF_TOKEN to a token"
            " of that account"
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return True, (
            f": there is no folder of this name here, and {hub} has no such repository, or it is"
            " private and HF_TOKEN does not give access"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return True, f": the repository has no revision {revision or 'main'!r}"
    if status is not None:
        return True, f": {hub} answered with HTTP status {status}; try again later"
    if is_offline_mode():
        return True, (
            f"{not_cached}downloads are turned off (HF_HUB_OFFLINE): turn them on, or give a model"
            " folder"
        )
    if isinstance(error, errors.LocalEntryNotFoundError) or of_network:
        return True, (
            f"{not_cached}{hub} cannot be reached: check the network or HF_ENDPOINT, or give a"
            " model folder"
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return False, " does not fit on the disk of the model cache"
    if isinstance(error, OSError) and error.strerror:
        return False, f": the model cache cannot be written: {error.strerror}"
    return False, f": its download failed ({type(error).__name__}); try again"


def _note_partial(event: str, arguments: tuple[Any, ...]) -> None:
    """Record each partial file that is opened, because no later download could resume it."""
    if event != "open" or not isinstance(arguments[0], str | Path):
        return
    path = Path(arguments[0])
    if path.suffix == ".incomplete":
        if _ending.is_set():
            raise SystemExit
        _partial.append(path)


def _end_with_stdin() -> None:
    """Wait until the parent closes standard input or dies; then delete partial files and exit."""
    sys.stdin.buffer.read()
    _ending.set()
    for _ in range(2):  # the second time for a file that was just being opened
        _remove_partial()
        time.sleep(_OPENING_SECONDS)
    os._exit(1)


def _remove_partial() -> None:
    for path in _partial:
        path.unlink(missing_ok=True)


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
