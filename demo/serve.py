"""`make serve`: the gateway with a models folder that has at least one model.

`MODELS=` names the user's own folder, to which nothing is written. Otherwise the model, the default
one or the one named by `MODEL=`, gets a folder of its own in the cache, with a file that may be
edited.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from common import inherited_signals, launch
from demo import default_model
from gateway.arguments import parser

USAGE = 'make serve [MODEL=… or MODELS=FOLDER] [SERVE="OPTION…"]'


def plain(text: str) -> str:
    """A name without characters that are not allowed in URLs or file names."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)


def model_file(reference: str) -> tuple[str, str]:
    """A file's name and text for a model named by a path or a hub id."""
    local = Path(reference).expanduser()
    place = str(local.absolute()) if local.exists() else reference
    name = plain(place.rstrip("/").rpartition("/")[2]) or "model"
    lines = [
        f"name: {json.dumps(name)}",  # JSON is YAML
        "parameters:",
        f"  model: {json.dumps(place)}",
    ]
    return f"{name}.yaml", "\n".join([*lines, ""])


def models_folder(environ: Mapping[str, str]) -> Path:
    """The folder to serve, with a file for the requested model.

    An existing file may have been edited by the user, so it is not changed. Raises
    ModelUnavailable.
    """
    if own := environ.get("MODELS"):
        return Path(own).expanduser()
    reference = environ.get("MODEL") or str(default_model.ensure())
    name, text = model_file(reference)
    folder = default_model.cache_directory() / "gateway" / plain(reference).strip("-.")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / name).exists():
        (folder / name).write_text(text, "utf-8")
    return folder


def main() -> NoReturn:
    """Replace this process by the gateway, with its signals and its exit code."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        parser(USAGE).print_help()
        sys.exit(0)
    if not any(argument.partition("=")[0] == "--models-dir" for argument in arguments):
        try:
            folder = models_folder(os.environ)
        except (default_model.ModelUnavailable, OSError) as error:
            sys.exit(f"error: {error}")
        arguments = ["--models-dir", str(folder), *arguments]
    launch.hold_interrupts()  # until the gateway accepts them
    os.execv(sys.executable, [sys.executable, "-m", "gateway", *arguments])


if __name__ == "__main__":
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # blocked by common.launch
        main()
    except KeyboardInterrupt:  # the files of an unfinished download have been removed
        inherited_signals.accept_interrupts()
        signal.raise_signal(signal.SIGINT)
