"""The gateway as a user runs it: its own process and models folder, called over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
TINY_TEXT = ROOT / "tests" / "models" / "tiny_text"
WAIT = 240.0  # seconds, on a busy machine too
_MARK = "GATEWAY_TEST_RUN"  # what every process below this gateway inherits
_LISTENING = re.compile(r"(?:listening on|running on) (http://\S+:\d+)")


def tiny(**settings: Any) -> dict[str, Any]:
    """The settings of a model file for the small trained model."""
    return {"parameters": {"model": str(TINY_TEXT)}, "context_size": 1024, **settings}


def roomy(**settings: Any) -> dict[str, Any]:
    """As `tiny`, with a context so long that no answer fills it while a test runs."""
    return tiny(context_size=200_000, **settings)


class GatewayProcess:
    """A running gateway: `url` without a slash at its end, `log` with its lines of stderr.

    `models` are the files of its models folder, by model name. Raises AssertionError with the log
    if it does not answer /health. Without a cache folder of its own it stores no prompts. Streams
    have no keep-alive events unless `arguments` set their interval: on a slow machine, one could
    begin a stream before its request is refused.
    """

    def __init__(
        self, models: Mapping[str, Mapping[str, Any]], *arguments: str, **environ: str
    ) -> None:
        self.log: list[str] = []
        self.url = ""
        self._mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="gateway-")
        self.models_dir = Path(self._folder.name)
        for name, settings in models.items():
            # JSON is YAML.
            (self.models_dir / f"{name}.yaml").write_text(json.dumps({"name": name, **settings}))
        self.child = subprocess.Popen(
            [
                str(ROOT / "scripts" / "python"),
                *("-m", "gateway", "--models-dir", self._folder.name, "--port", "0"),
                *(() if "MLX_BACKEND_CACHE" in environ else ("--forget-prompts",)),
                *("--keepalive-interval", "3600", *arguments),
            ],
            cwd="/",
            env=os.environ | environ | {_MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._bound = threading.Event()
        self._told = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._bound.wait(WAIT) or not self.url:
            self._abandon()
            raise AssertionError(f"the gateway did not start: {self.log}")
        self.client = httpx.Client(base_url=self.url, timeout=WAIT, trust_env=False)
        try:
            assert self.client.get("/health").status_code == 200
        except (httpx.HTTPError, AssertionError):
            self.client.close()
            self._abandon()
            raise AssertionError(f"the gateway is not healthy: {self.log}") from None

    def _abandon(self) -> None:
        """End all its processes, and remove its folder."""
        for process in self.processes():
            process.kill()
        self.child.wait(WAIT)
        self._reader.join(WAIT)
        self._folder.cleanup()

    def _read(self) -> None:
        assert self.child.stderr is not None
        with self.child.stderr as lines:
            for line in lines:
                with self._told:
                    self.log.append(line.rstrip())
                    self._told.notify_all()
                if not self.url and (match := _LISTENING.search(line)):
                    self.url = match[1]
                    self._bound.set()
        self._bound.set()

    def line_with(self, *words: str) -> str:
        """The first line of the log that has all the words; waits for it if necessary."""

        def found() -> str | None:
            return next((line for line in self.log if all(word in line for word in words)), None)

        with self._told:
            line = self._told.wait_for(found, WAIT)
        assert line is not None, (words, self.log)
        return line

    def whole_log(self) -> list[str]:
        """The log with the lines of all requests that have been answered; `log` may lag behind."""
        mark = uuid.uuid4().hex
        self.client.get("/v1/models", headers={"x-request-id": mark})
        self.line_with(f"request={mark}")
        return list(self.log)

    def processes(self) -> list[psutil.Process]:
        """Every process that the gateway or its children started, itself included."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return process.environ().get(_MARK) == self._mark
        except (psutil.Error, OSError):
            return False

    def backends(self) -> list[psutil.Process]:
        """The processes of our own backend that are running."""
        return [
            process
            for process, command in self.commands()
            if "backend" in command and not any("warden" in each for each in command)
        ]

    def commands(self) -> list[tuple[psutil.Process, list[str]]]:
        """Every process that is running, with its command line."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it has just ended
                found.append((process, process.cmdline()))
        return found

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self.child.send_signal(signal.SIGTERM)
        code = self.child.wait(WAIT)
        self._reader.join(WAIT)
        return code

    def close(self) -> None:
        """Stop it, and check that it exits with 0 and leaves no process behind."""
        self.client.close()
        try:
            code = self.terminate()
            orphans = [process.cmdline() for process in self.processes()]
            assert code == 0, self.log
            assert orphans == [], orphans
        finally:
            self._abandon()
