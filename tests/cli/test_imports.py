"""The command starts fast."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import cli

ROOT = Path(cli.__file__).parents[1]


def test_the_help_and_the_shell_wait_for_no_large_library() -> None:
    script = "import json, sys, cli.command_line; print(json.dumps(sorted(sys.modules)))"
    command = [str(ROOT / "scripts" / "python"), "-c", script]
    loaded = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert not {"fastapi", "grpc", "httpx", "huggingface_hub", "mlx", "pydantic"} & set(loaded)
