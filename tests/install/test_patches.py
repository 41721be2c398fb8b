"""docs/patches.md lists every patch of a library, and the versions for which it was checked."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = (ROOT / "docs" / "patches.md").read_text("utf-8")
ROWS = re.findall(r"^\| `([\w/]+)` \| ([^|]+) \| [^|]+ \| (.+) \|$", LIST, re.MULTILINE)
VERSIONS = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|$", LIST, re.MULTILINE))
PATCHING = "backend.engine.patching"
PACKAGES = {library.replace("-", "_") for library in VERSIONS} | {"grpc"}
FILES = [
    path
    for part in ("backend", "common", "gateway", "cli", "scripts")
    for path in sorted((ROOT / part).rglob("*.py"))
]


def locked(library: str) -> Iterator[tuple[str, str]]:
    """The locks that have the library, with its version there."""
    for lock in sorted((ROOT / "requirements").glob("*.lock")):
        for version in re.findall(rf"^{library}==(\S+)", lock.read_text(), re.MULTILINE):
            yield lock.name, version


def root_of(target: ast.expr) -> str:
    """The name before the first dot."""
    while isinstance(target, ast.Attribute):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def patches(path: Path) -> bool:
    """Whether a file replaces a method of an object, its class, or a library's function."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    if any(isinstance(node, ast.ImportFrom) and node.module == PATCHING for node in nodes):
        return True
    modules = {
        alias.asname or alias.name.split(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] in PACKAGES
    }
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    return any(
        isinstance(target, ast.Attribute)
        and (target.attr == "__class__" or root_of(target) in modules)
        for target in targets
    )


@pytest.mark.parametrize("library", VERSIONS)
def test_the_list_was_checked_for_the_locked_version(library: str) -> None:
    found = dict(locked(library))
    found.pop(
        "clients.lock", None
    )  # programs that talk to the gateway, in an environment of their own
    assert set(found.values()) == {VERSIONS[library]}, f"check the rows of {library} in the list"


def test_rows_name_modules_and_libraries_that_exist() -> None:
    assert len(ROWS) > 40
    for module, libraries, _ in ROWS:
        assert (ROOT / module).with_suffix(".py").exists(), module
        assert set(libraries.split(", ")) <= VERSIONS.keys(), module


@pytest.mark.parametrize("test", sorted({test for *_, test in ROWS} - {"none"}))
def test_rows_name_tests_that_exist(test: str) -> None:
    path, _, function = test.strip("`").partition("::")
    found = ROOT / path
    assert found.exists()
    assert not function or f"def {function}(" in found.read_text("utf-8")


def test_every_patch_is_listed() -> None:
    listed = {module for module, *_ in ROWS}
    patched = {str(path.relative_to(ROOT).with_suffix("")) for path in filter(patches, FILES)}
    assert len(patched) > 12
    assert patched <= listed


def test_comments_name_no_version() -> None:
    """A comment with a version is wrong after every update; the list is checked at once."""
    library = "|".join((*VERSIONS, "MLX", "gRPC"))
    named = re.compile(rf"(?<![\w-])({library}) v?\d+\.\d")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in FILES
        for line in path.read_text("utf-8").splitlines()
        if named.search(line)
    ]
    assert found == []
