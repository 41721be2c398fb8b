"""The hooks that hatchling calls to build the wheel: its dependencies, and what the checkout lacks.

The wheel contains mlx-vlm and mlx-audio, because a wheel cannot depend on a package without all
that this package requires. They require 300 MB that the locks leave out (`scripts/lock.sh`),
including an OpenCV that needs libGL. Both are under the MIT licence, and come with its text.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

EXTRAS = {"cpu": "linux-cpu", "cuda12": "linux-cuda12", "cuda13": "linux-cuda13"}
# The stubs are compiled here, so that installing the wheel needs no compiler.
BUILD_ONLY = "grpcio-tools"
CARRIED = ("mlx-vlm", "mlx-audio")
# Of a carried package: tests, and the list of files, which would not hold for this wheel.
LEFT_OUT = re.compile(r"(.*/)?tests/|[^/]*\.dist-info/RECORD")


def requirements(root: Path, name: str) -> list[str]:
    """Return the lines of a file in requirements/, without the files that it includes."""
    lines = (root / "requirements" / f"{name}.in").read_text("utf-8").splitlines()
    return [line for line in lines if line and line[0] not in "#-"]


def locked(root: Path) -> Iterator[tuple[str, str]]:
    """Yield each package of a lock: its name, and its lines."""
    text = (root / "requirements" / "macos-metal.lock").read_text("utf-8")
    for block in re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]:
        yield block.partition("==")[0], block


def required_by_carried(root: Path) -> list[str]:
    """Return the packages of the locks that the carried packages require."""
    by = re.compile(rf"# +(via )?({'|'.join(CARRIED)})$", re.MULTILINE)
    return [name for name, block in locked(root) if by.search(block)]


class Dependencies(MetadataHookInterface):
    """`dependencies` and `optional-dependencies` of pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        absent = (BUILD_ONLY, *CARRIED)
        base = [line for line in requirements(root, "base") if not line.startswith(absent)]
        base += (name for name in required_by_carried(root) if name not in CARRIED)
        # The default model is downloaded with pip, which environments of uv lack.
        wanted = {*base, *requirements(root, "gateway"), *requirements(root, "macos-metal"), "pip"}
        pinned = {line.split("==")[0] for line in wanted if "==" in line}
        metadata["dependencies"] = sorted(line for line in wanted if line not in pinned)
        metadata["optional-dependencies"] = {
            extra: requirements(root, file) for extra, file in EXTRAS.items()
        }


class Contents(BuildHookInterface[Any]):
    """Adds wire/, generated from backend.proto as by install.sh, and the carried packages."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._generate(folder)
        self._carry(folder)
        for file in folder.rglob("*"):
            if file.is_file():
                build_data["force_include"][str(file)] = file.relative_to(folder).as_posix()

    def _generate(self, folder: Path) -> None:
        from grpc_tools import protoc

        arguments = [
            "protoc",
            f"-I{files('grpc_tools') / '_proto'}",
            f"-Iwire={self.root}",
            f"--python_out={folder}",
            f"--grpc_python_out={folder}",
            "wire/backend.proto",
        ]
        if protoc.main(arguments) != 0:
            raise RuntimeError("backend.proto could not be compiled (see above)")
        (folder / "wire" / "__init__.py").touch()

    def _carry(self, folder: Path) -> None:
        """Unpack the carried packages, which pip checks by the hashes of the lock."""
        with tempfile.TemporaryDirectory() as scratch:
            wanted = Path(scratch, "carried.txt")
            wanted.write_text("".join(b for n, b in locked(Path(self.root)) if n in CARRIED))
            options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--quiet"]
            command = [sys.executable, "-m", "pip", "download", *options, "--dest", scratch]
            subprocess.run([*command, "--requirement", wanted], check=True)
            for wheel in Path(scratch).glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    names = [n for n in archive.namelist() if not LEFT_OUT.match(n)]
                    archive.extractall(folder, names)
