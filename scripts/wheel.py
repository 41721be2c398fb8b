"""The hooks that hatchling calls to build the wheel: its dependencies, and the stubs in wire/."""

from __future__ import annotations

import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

EXTRAS = {"cpu": "linux-cpu", "cuda12": "linux-cuda12", "cuda13": "linux-cuda13"}
# Compiled here, so that installing the wheel needs no compiler.
BUILD_ONLY = "grpcio-tools"


def requirements(root: Path, name: str) -> list[str]:
    """The lines of a file in requirements/, without the files that it includes."""
    lines = (root / "requirements" / f"{name}.in").read_text("utf-8").splitlines()
    return [line for line in lines if line and line[0] not in "#-"]


class Dependencies(MetadataHookInterface):
    """`dependencies` and `optional-dependencies` of pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        base = [line for line in requirements(root, "base") if not line.startswith(BUILD_ONLY)]
        # The default model is downloaded with pip, which environments of uv lack.
        wanted = {*base, *requirements(root, "gateway"), *requirements(root, "macos-metal"), "pip"}
        pinned = {line.split("==")[0] for line in wanted if "==" in line}
        metadata["dependencies"] = sorted(line for line in wanted if line not in pinned)
        metadata["optional-dependencies"] = {
            extra: requirements(root, file) for extra, file in EXTRAS.items()
        }


class Stubs(BuildHookInterface[Any]):
    """Generates wire/ from backend.proto for this wheel, as install.sh does for a checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        from grpc_tools import protoc

        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
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
        for file in sorted((folder / "wire").iterdir()):
            build_data["force_include"][str(file)] = f"wire/{file.name}"
