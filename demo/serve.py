"""`make serve`: the gateway on a models folder that has at least one model.

`MODELS=` names the user's own folder, and nothing is written there. Otherwise a folder in the
cache is used, with a file for the default model, or for the one that `MODEL=` names: it stays
there, so the folder grows with what was asked for.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from demo import default_model

CONTEXT_SIZE = 4096


def default_folder() -> Path:
    """The models folder of whoever has none of their own."""
    return default_model.cache_directory() / "gateway" / "models"


def model_file(reference: str) -> tuple[str, str]:
    """A file's name and text for a model named by a path or a hub id."""
    local = Path(reference).expanduser()
    place = str(local.absolute()) if local.exists() else reference
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", place.rstrip("/").rpartition("/")[2]) or "model"
    lines = [
        f"name: {json.dumps(name)}",  # JSON is YAML
        f"context_size: {CONTEXT_SIZE}",
        "parameters:",
        f"  model: {json.dumps(place)}",
    ]
    return f"{name}.yaml", "\n".join([*lines, ""])


def models_folder(environ: Mapping[str, str]) -> Path:
    """The folder to serve, with a file for the model that is asked for.

    A file that is there already is somebody's own by now, and stays as it is. Raises
    ModelUnavailable.
    """
    if own := environ.get("MODELS"):
        return Path(own).expanduser()
    folder = default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    name, text = model_file(environ.get("MODEL") or str(default_model.ensure()))
    if not (folder / name).exists():
        (folder / name).write_text(text, "utf-8")
    return folder


def main() -> NoReturn:
    """Become the gateway: its signals and its exit code are then its own."""
    try:
        folder = models_folder(os.environ)
    except (default_model.ModelUnavailable, OSError) as error:
        sys.exit(f"error: {error}")
    command = [sys.executable, "-m", "gateway", "--models-dir", str(folder), *sys.argv[1:]]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
