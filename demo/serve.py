"""`make serve` and `mlx-backend serve`: the gateway with one model, or with a folder of models.

`MODEL=` names a folder or a hub id, and `MODELS=` the user's own folder of model files. Without
both, the gateway serves the default model. Nothing is stored for later calls.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from common import inherited_signals, launch
from demo import default_model
from gateway.arguments import parser

USAGE = 'make serve [MODEL=… or MODELS=FOLDER] [SERVE="OPTION…"]'


class Contradiction(Exception):
    """Two settings name what to serve; the text says which."""


def arguments_for(given: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The gateway's arguments. Raises Contradiction, ModelUnavailable, OSError."""
    named = [flag for flag in ("--models-dir", "--model") if _has(flag, given)]
    variables = {name: value for name in ("MODELS", "MODEL") if (value := environ.get(name))}
    chosen = [*named, *(f"{name}={value}" for name, value in variables.items())]
    if len(chosen) > 1:
        raise Contradiction(f"both {' and '.join(chosen)} say what to serve: give only one of them")
    if named:
        return list(given)
    if "MODELS" in variables:
        return ["--models-dir", variables["MODELS"], *given]
    return ["--model", variables.get("MODEL") or str(default_model.ensure()), *given]


def _has(flag: str, arguments: Sequence[str]) -> bool:
    return any(argument.partition("=")[0] == flag for argument in arguments)


def main() -> NoReturn:
    """Replace this process by the gateway, with its signals and its exit code."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        parser(USAGE).print_help()
        sys.exit(0)
    try:
        arguments = arguments_for(arguments, os.environ)
    except Contradiction as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except (default_model.ModelUnavailable, OSError) as error:
        sys.exit(f"error: {error}")
    launch.hold_interrupts()  # until the gateway accepts them
    os.execv(sys.executable, [sys.executable, "-m", "gateway", *arguments])


if __name__ == "__main__":
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # blocked by common.launch
        main()
    except KeyboardInterrupt:  # the files of an unfinished download have been removed
        inherited_signals.accept_interrupts()
        signal.raise_signal(signal.SIGINT)
