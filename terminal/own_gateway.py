"""A gateway of one's own, for a conversation on a machine where none runs."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from terminal.client import ChatFailed

_LISTENING = re.compile(r"listening on (http://\S+:\d+)")
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


@contextmanager
def started(models_dir: Path) -> Iterator[str]:
    """The address of a gateway that ends with the block. Raises ChatFailed with its last words."""
    # In a session of its own: Ctrl-C stops an answer here, not the gateway.
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--models-dir", str(models_dir), "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    last: deque[str] = deque(maxlen=1)
    found: list[str] = []
    known = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            last.append(line.strip())
            if not found and (match := _LISTENING.search(line)):
                found.append(match[1])
                known.set()
        known.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        known.wait(_START_SECONDS)
        if not found:
            raise ChatFailed(f"the gateway did not start: {''.join(last) or 'no word from it'}")
        yield found[0]
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
