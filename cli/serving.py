"""Runs the gateway, as a child process or instead of this process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from cli import default_model, local_models
from cli.options import gateway_flags
from cli.progress import Progress
from common import launch
from common.child_environment import SETTINGS, backend_environ
from common.process_end import wait_or_kill
from common.progress_bar import DOWNLOAD, DOWNLOADED
from common.user_path import user_path
from common.wording import did_you_mean
from gateway.arguments import BadArgument, settings_from

_LISTENING = re.compile(r"gateway: listening on (\S+)")
_REASON = re.compile(r"gateway: (.+)")
_STOP_SECONDS = 30.0
_SOURCES = (f"{SETTINGS}MODELS_DIR", f"{SETTINGS}MODEL")


class Contradiction(click.UsageError):
    """More than one setting says what to serve."""

    def __init__(self, settings: Sequence[str]) -> None:
        super().__init__(f"both {' and '.join(settings)} say what to serve: give only one of them")


def arguments_for(given: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the gateway's arguments. Raises Contradiction, ModelUnavailable, OSError.

    given: the flags of the command.
    environ: may set MODEL (a folder or a hub id) or MODELS (a folder of model files), or what the
        gateway itself reads. If neither flags nor variables say what to serve, the gateway serves
        the default model.
    """
    flags = {argument.partition("=")[0] for argument in given}
    named = [flag for flag in ("--models-dir", "--model") if flag in flags]
    variables = {name: value for name in ("MODELS", "MODEL") if (value := environ.get(name))}
    # Flags take precedence over the gateway's own variables.
    own = {} if named else {name: value for name in _SOURCES if (value := environ.get(name))}
    chosen = [*named, *(f"{name}={value}" for name, value in (variables | own).items())]
    if len(chosen) > 1:
        raise Contradiction(chosen)
    if named or own:
        return list(given)
    if "MODELS" in variables:
        return ["--models-dir", variables["MODELS"], *given]
    return ["--model", reference_of(variables.get("MODEL", "")), *given]


def require_settings(given: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise UsageError for a setting that the gateway refuses, before a model is downloaded for it.

    given: the values of the command's options. What to serve is not checked.
    """
    others = {name: value for name, value in environ.items() if name not in _SOURCES}
    try:
        settings_from(list(gateway_flags({**given, "models_dir": None, "model": "."})), others)
    except BadArgument as problem:
        raise click.UsageError(str(problem)) from None


def reference_of(name: str) -> str:
    """Return the folder or hub id of the model that a user names.

    Raises ClickException, ModelUnavailable, OSError.

    name: a folder, a hub id, or the short name of a downloaded model; "" for the default model.
        Upper and lower case of a short name do not matter.
    """
    if not name or (name.casefold() == default_model.NAME.casefold() and not Path(name).exists()):
        return str(default_model.ensure())
    if "/" in name or user_path(name).exists():
        return name
    models = local_models.found()
    for model in models:
        if model.short.casefold() == name.casefold():
            return model.reference
    if suggestion := did_you_mean(name, [model.short for model in models]):
        raise click.ClickException(
            f"{name!r} is neither a folder here nor a downloaded model{suggestion}"
        )
    return name


def become_gateway(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the gateway, which then receives its signals."""
    launch.hold_interrupts()  # until the gateway accepts them
    os.execv(sys.executable, [sys.executable, "-m", "gateway", *arguments])


@contextmanager
def gateway(arguments: Sequence[str]) -> Iterator[str]:
    """Run a gateway on a free port until the block ends; yields its URL once its model is loaded.

    Raises ClickException with the gateway's message if the gateway ends before that.
    """
    # Variables such as MLX_GATEWAY_API_KEYS are meant for the user's own gateway.
    environ = backend_environ(os.environ, {})
    process = subprocess.Popen(
        launch.command("-m", "gateway", *arguments, "--port=0"),
        env={name: value for name, value in environ.items() if not name.startswith(SETTINGS)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,  # Ctrl-C interrupts an answer, and not the gateway
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        yield _until_listening(process)
    finally:
        process.terminate()
        wait_or_kill(process, _STOP_SECONDS)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """Raise SystemExit, so that `finally` ends the gateway too."""
    raise SystemExit(128 + number)


def _until_listening(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    reasons: deque[str] = deque(maxlen=1)
    with Progress("loading") as progress:
        for line in process.stderr:
            if match := _LISTENING.search(line):
                _read_on(process)
                return match[1]
            if match := DOWNLOAD.search(line):
                progress.show(int(match[1]), int(match[2]))
            elif DOWNLOADED in line:
                progress.show(0, 0)
            elif match := _REASON.match(line):
                reasons.append(match[1])
    raise click.ClickException(
        reasons[0] if reasons else f"the gateway ended with {process.wait()}"
    )


def _read_on(process: subprocess.Popen[str]) -> None:
    """Read and drop the log of a gateway until it ends, because a full pipe would block it."""
    import threading

    threading.Thread(target=lambda: deque(process.stderr or (), maxlen=0), daemon=True).start()
