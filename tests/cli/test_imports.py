"""Programs import only what they need: the command starts fast, the demo needs no gateway."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.metadata import packages_distributions
from pathlib import Path

import cli

ROOT = Path(cli.__file__).parents[1]


def test_no_command_waits_for_a_large_library() -> None:
    """Only `list`, `show` and `rm` of a model of the hub need one."""
    modules = "command_line, client, conversation, launching, local_models, serving"
    named = modules.replace(" ", " cli.")
    script = f"import json, sys, cli.{named}; print(json.dumps(sorted(sys.modules)))"
    command = [str(ROOT / "scripts" / "python"), "-c", script]
    loaded = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    large = {"fastapi", "grpc", "httpx", "huggingface_hub", "mlx", "psutil", "pydantic", "rich"}
    assert not large & set(loaded)


def _packages(lock: str) -> set[str]:
    text = (ROOT / "requirements" / f"{lock}.lock").read_text()
    return set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))


def test_the_demo_needs_only_the_packages_that_are_installed_for_it() -> None:
    """Those of the gateway are missing then."""
    missing = _packages("gateway") - _packages("linux-cpu")
    distributions = packages_distributions()
    modules = [name for name, of in distributions.items() if set(of) <= missing]
    assert {"fastapi", "httpx", "psutil"} <= set(modules)
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({modules}))\n"
        "import backend.engine.loading.loader, backend.rpc.lifetime\n"
        "import cli.demo, cli.gguf_to_mlx"
    )
    command = [str(ROOT / "scripts" / "python"), "-c", script]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
