"""Which modules of the engine may load which others."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import backend.engine

ENGINE = Path(backend.engine.__file__).parent
ROOM = "backend.engine"


def name_of(path: Path) -> str:
    parts = path.relative_to(ENGINE.parent.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ENGINE.rglob("*.py"))}


def loaded_at_once(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when the module is loaded: none in functions or for type checkers."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                yield node
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case _:
                yield from loaded_at_once(node)


def imports(name: str) -> set[str]:
    """The modules of the engine that a module loads."""
    found: set[str] = set()
    for node in loaded_at_once(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            module = node.module or ""
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys() - {name}


def reaches(start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        for other in imports(left.pop()) - found:
            found.add(other)
            left.append(other)
    return found


def test_no_module_loads_itself_through_others() -> None:
    assert [name for name in MODULES if name in reaches(name)] == []


def test_a_file_name_means_one_thing() -> None:
    names = [path.name for path in MODULES.values() if path.name != "__init__.py"]
    assert [name for name in set(names) if names.count(name) > 1] == []


# What modules for text need to know of images and sounds: plain data, and one kind of cache.
PLAIN = {f"{ROOM}.{name}" for name in ("media.limits", "vision.families", "vision.media_plan")}


def test_modules_for_text_load_nothing_that_sees_or_hears() -> None:
    media = {name for name in MODULES if name.startswith((f"{ROOM}.vision", f"{ROOM}.media"))}
    assert media > PLAIN
    text = (MODULES.keys() - media) | PLAIN
    leaks = {name: leak for name in text if (leak := imports(name) & media - PLAIN)}
    assert leaks == {}


@pytest.mark.parametrize("name", ["planner", "plan", "prefix_index"])
def test_who_decides_needs_no_mlx(name: str) -> None:
    asked = f"import sys, {ROOM}.{name}; print(*[one for one in sys.modules if 'mlx' in one])"
    ran = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []
