"""Shows on the terminal how long an action has taken, and how much of a download is complete."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

from common.progress_bar import bar

_SECONDS = 0.2


class Progress:
    """A line on standard error that is updated until the block ends; none without a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._done = (0, 0)
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._drawing = threading.Thread(target=self._draw, daemon=True)

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._drawing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._drawing.is_alive():
            self._drawing.join()
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def show(self, done: int, total: int) -> None:
        """Set how much of a download is complete.

        done: MiB that were downloaded.
        total: MiB of the whole download.
        """
        self._done = (done, total)

    def line(self) -> str:
        """Return the text of the line."""
        done, total = self._done
        passed = f"{self._what} {time.monotonic() - self._started:.0f} s"
        return f"{passed} {bar(done, total)}" if done < total else passed

    def _draw(self) -> None:
        while not self._ended.wait(_SECONDS):
            print(f"\r{self.line()}\033[K", end="", file=sys.stderr, flush=True)
