"""The start of the gateway loads no HTTP client."""

from __future__ import annotations

import ast
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
