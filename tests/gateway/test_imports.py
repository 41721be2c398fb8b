"""The start of the gateway loads no HTTP client, and builds no schema of a body."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import gateway

ROOT = Path(gateway.__file__).parent


def test_the_start_imports_no_http_client() -> None:
    """The HTTP client takes a tenth of the start, and only images fetched by URL need it."""
    for file in ROOT.rglob("*.py"):
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [name.name for name in node.names] + [getattr(node, "module", None) or ""]
                assert not any(name.split(".")[0] == "httpx" for name in names), file


def test_the_start_builds_no_schema_of_a_body() -> None:
    """All of them would take a sixth of the start, and few clients use more than one API.

    The forms of transcriptions are built, because the routes describe them for OpenAPI.
    """
    script = """
import gateway.app
from gateway.fields import Request
found = [Request]
for schema in found:
    found += schema.__subclasses__()
built = [schema.__name__ for schema in found if schema.__pydantic_complete__]
print(len(found) > 10, sorted(built))
"""
    command = [str(ROOT.parent / "scripts" / "python"), "-c", script]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert (done.returncode, done.stdout) == (
        0,
        "True ['TranscriptionRequest', 'TranslationRequest']\n",
    ), done.stderr
