"""Running the project's scripts the way a person or a host does."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600

# Variables of the test run that must not affect the scripts under test.
STEERING = (
    "BUILD_TYPE",
    "CUDA_DEVICE_ORDER",
    "CUDA_MAJOR_VERSION",
    "CUDA_VISIBLE_DEVICES",
    "EXTRA_PIP_INSTALL_FLAGS",
    "PYTHON",
)
# Set by scripts/python for the interpreter that runs the tests.
OURS = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSAFEPATH", "OPENBLAS_NUM_THREADS")


def clean_environment(**changes: str) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in STEERING + OURS}
    return environment | changes


def shell(
    *command: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean_environment() if environment is None else environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
