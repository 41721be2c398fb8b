"""The program that downloads one repository from the hub, run as a child process.

A download inside the server could not be cancelled: the hub's client blocks as long as a connection
is silent. A process can be ended at any moment, and this one ends itself when its standard input
closes, so that it never outlives the server. It writes JSON lines to standard output: progress,
then one result or one error.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar, Self

_REPORT_SECONDS = 0.5
# bytes per read; the hub's own 10 MiB hide the progress of a slow connection
_CHUNK_BYTES = 1 << 20
_OPENING_SECONDS = 0.05

_ending = threading.Event()
_partial: list[Path] = []


def main() -> None:
    """Download what the first argument, a JSON object, describes."""
    # The folder of this file comes first on the path and would hide other packages' modules.
    del sys.path[0]
    request = json.loads(sys.argv[1])
    sys.addaudithook(_note_partial)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        _say(event="done", path=_fetch(**request))
    except BaseException as error:  # any error must be reported to the parent
        _say(event="error", **_described(error))
    _remove_partial()
    os._exit(0)  # the parent waits, and the end of an interpreter with these libraries takes long


def _fetch(repository: str, revision: str, patterns: list[str], cache: str) -> str:
    from huggingface_hub import constants, snapshot_download

    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
    threading.Thread(target=_report, daemon=True).start()
    path: str = snapshot_download(
        repository,
        revision=revision or None,
        allow_patterns=patterns,
        cache_dir=cache,
        tqdm_class=Bar,
    )
    return path


class Bar:
    """Replaces the tqdm progress bar of the hub's client: it counts and draws nothing."""

    all: ClassVar[list[Bar]] = []

    def __init__(
        self, *_: Any, total: float | None = None, initial: float = 0, unit: str = "", **__: Any
    ) -> None:
        self.total = total
        self.n = initial
        self.unit = unit
        self.disable = False
        self.format_dict: dict[str, Any] = {}
        Bar.all.append(self)

    def update(self, n: float | None = 1) -> None:
        self.n += n or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def _ignore(self, *_: Any, **__: Any) -> None:
        return

    refresh = clear = close = _ignore
    set_description = set_description_str = set_postfix = set_postfix_str = _ignore


def _report() -> None:
    while True:
        time.sleep(_REPORT_SECONDS)
        _say_progress(list(Bar.all))


def _say_progress(bars: list[Bar]) -> None:
    """Report progress. Two bars count the bytes: as they arrive, and as they reach the disk."""
    in_bytes = [bar for bar in bars if bar.unit == "B"]
    in_files = [bar for bar in bars if bar.unit != "B"]
    if in_bytes and in_files:
        _say(
            event="progress",
            files=int(in_files[-1].n),
            all_files=int(in_files[-1].total or 0),
            bytes=int(max(bar.n for bar in in_bytes)),
            all_bytes=int(min(bar.total or 0 for bar in in_bytes)),
        )


def _described(error: BaseException) -> dict[str, Any]:
    """The kind of a failure; the parent has a message for each."""
    from huggingface_hub import errors
    from huggingface_hub.constants import is_offline_mode

    if isinstance(error, errors.GatedRepoError):
        return {"kind": "gated"}
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return {"kind": "absent"}
    if isinstance(error, errors.RevisionNotFoundError):
        return {"kind": "revision"}
    cause = error.__cause__ or error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status is not None:
        return {"kind": "refused", "detail": f"HTTP status {status}"}
    if is_offline_mode():
        return {"kind": "offline"}
    if isinstance(error, errors.LocalEntryNotFoundError) or _of_network(cause):
        return {"kind": "unreachable"}
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return {"kind": "disk_full"}
    if isinstance(error, OSError) and error.strerror:
        return {"kind": "disk", "detail": error.strerror}
    return {"kind": "failed", "detail": type(error).__name__}


def _of_network(error: BaseException) -> bool:
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


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
    """Wait until the parent closes our standard input or dies; then leave no partial file."""
    sys.stdin.buffer.read()
    _ending.set()
    for _ in range(2):  # again, for a file that was just being opened
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
