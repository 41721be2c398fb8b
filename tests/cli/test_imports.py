"""The command starts fast, and reaches a backend only over the network."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import cli

ROOT = Path(cli.__file__).parents[1]


def test_no_module_imports_the_backend() -> None:
    for file in (ROOT / "cli").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "backend" for name in names), file


def test_the_help_and_the_shell_wait_for_no_large_library() -> None:
    script = "import json, sys, cli.command_line; print(json.dumps(sorted(sys.modules)))"
    command = [str(ROOT / "scripts" / "python"), "-c", script]
    loaded = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert not {"fastapi", "grpc", "httpx", "huggingface_hub", "mlx", "pydantic"} & set(loaded)
