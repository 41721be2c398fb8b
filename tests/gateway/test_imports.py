"""Packages of the gateway import each other in one direction only; its start loads no httpx."""

from __future__ import annotations

import ast
from pathlib import Path

import gateway

ROOT = Path(gateway.__file__).parent


def part_of(module: str) -> str:
    """The package of a module; modules beside the packages count one by one."""
    return module.split(".")[1] if module.count(".") else module


def imports(file: Path) -> set[str]:
    """The parts of the gateway that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gateway":
            own = node.module == "gateway"
            found |= {f"gateway.{name.name}" for name in node.names} if own else {str(node.module)}
    return {part_of(module) for module in found}


def test_no_part_imports_itself_through_others() -> None:
    loads: dict[str, set[str]] = {}
    for file in ROOT.rglob("*.py"):
        part = file.relative_to(ROOT).with_suffix("").parts[0]
        loads.setdefault(part, set()).update(imports(file) - {part})
    for part in loads:
        reached: set[str] = set()
        left = [part]
        while left:
            for other in loads.get(left.pop(), set()) - reached:
                reached.add(other)
                left.append(other)
        assert part not in reached, part
    assert {"openai", "supervisor", "errors"} <= loads.keys()


def test_the_start_imports_no_http_client() -> None:
    """The HTTP client takes a tenth of the start, and only images fetched by URL need it."""
    for file in ROOT.rglob("*.py"):
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [name.name for name in node.names] + [getattr(node, "module", None) or ""]
                assert not any(name.split(".")[0] == "httpx" for name in names), file
