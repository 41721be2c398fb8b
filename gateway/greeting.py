"""Prints the gateway's address for the person who starts it, once it can be used."""

from __future__ import annotations

import json
import sys
import time

from common.progress_bar import bar
from gateway.settings import GatewaySettings
from gateway.supervisor.instance import State
from gateway.supervisor.supervisor import Supervisor

_FAILED = (State.FAILED, State.BACKING_OFF)


class Greeting:
    """The address, printed at once, or with --model after the model is loaded.

    If the model cannot be loaded, the gateway ends.
    """

    def __init__(self, url: str, settings: GatewaySettings, supervisor: Supervisor) -> None:
        self._url = url
        self._settings = settings
        self._supervisor = supervisor
        self._started = time.monotonic()
        self._shown = 0  # seconds that the progress line shows
        self.failed = False
        self._waiting = bool(settings.model)
        if self._waiting:
            say(f"loading {settings.model}")
        else:
            self._greet()

    def update(self) -> None:
        """Print what has changed; sets `failed` if there is no model to serve."""
        if not self._waiting:
            return
        if self._supervisor.preloading:
            self._show_progress()
            return
        self._waiting = False
        (status, *_) = self._supervisor.status()
        if status.state in _FAILED:
            say(f"{self._settings.model} cannot be served: {status.error}")
            self.failed = True
        else:
            seconds = time.monotonic() - self._started
            say(f"loaded {status.name} in {seconds:.1f} s{self._context()}")
            self._greet()

    def _context(self) -> str:
        """Return the context of the loaded model, and why it is smaller than the requested one."""
        config = self._supervisor.resolve(None)
        context = self._supervisor.context_size(config)
        if not context:
            return ""
        asked = config.context_size
        smaller = f", not {asked:,}: the model was made for no more" if asked > context else ""
        return f", with a context of {context:,} tokens{smaller}"

    def _greet(self) -> None:
        for line in lines(self._url, self._settings, self._supervisor):
            say(line)

    def _show_progress(self) -> None:
        """Show on a terminal how long the load has taken, in a line that is overwritten."""
        passed = int(time.monotonic() - self._started)
        if passed == self._shown or not sys.stderr.isatty():
            return
        self._shown = passed
        status = next(iter(self._supervisor.status()), None)
        done, total = (status and status.download) or (0, 0)
        shown = f"loading {passed} s {bar(done, total) if done < total else ''}".rstrip()
        print(f"\rgateway: {shown}\033[K\r", end="", file=sys.stderr, flush=True)


def say(line: str) -> None:
    print(f"gateway: {line}", file=sys.stderr, flush=True)


def lines(url: str, settings: GatewaySettings, supervisor: Supervisor) -> list[str]:
    """Return the gateway's address, and a command that shows that it works."""
    first = [f"listening on {url}"]
    models = supervisor.models
    if not models:
        return [*first, "there is no model yet: put a YAML file into the models folder"]
    first.append(f"chat page: {url}/")
    known = supervisor.checkpoints
    model = next((each for each in models if "completion" in known.abilities(each)), None)
    if model is None:
        return first
    key = " -H 'Authorization: Bearer '$KEY" if settings.api_keys else ""
    question = {"model": model.name, "messages": [{"role": "user", "content": "Hello!"}]}
    # A name may contain an apostrophe; JSON escapes it in a way that the shell leaves alone.
    body = json.dumps(question).replace("'", "\\u0027")
    curl = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    return [*first, f"try: {curl}"]
