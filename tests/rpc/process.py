"""Starts a backend process and waits for its output, never for a fixed time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue

from tests.log_text import untimed

ROOT = Path(__file__).parents[2]
WAIT = 240.0  # seconds, on a busy machine too


class Process:
    """A child whose stderr lines can be awaited one by one."""

    def __init__(
        self, *arguments: str, module: str = "backend", env: dict[str, str] | None = None
    ) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: Queue[str | None] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(untimed(line.rstrip("\n")))
            self._queue.put(line)
        self._queue.put(None)

    def line_with(self, text: str) -> str:
        """The next line on stderr that contains the text."""
        while (line := self._queue.get(timeout=WAIT)) is not None:
            if text in line:
                return line
        raise AssertionError(f"no line with {text!r} in {self.lines}")

    def port(self) -> int:
        match = re.search(r"addr=\S+:(\d+)", self.line_with("event=listening"))
        assert match is not None
        return int(match[1])

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    def wait(self) -> int:
        code = self.child.wait(WAIT)
        self._reader.join(WAIT)
        return code

    def stdout(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.read()

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.wait()
        for pipe in (self.child.stdout, self.child.stderr):
            if pipe is not None:
                pipe.close()
