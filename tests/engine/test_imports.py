"""Which modules of the engine may load which others."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import backend.engine
from backend.engine import mlx_lm_import

ENGINE = Path(backend.engine.__file__).parent
ROOM = "backend.engine"


def name_of(path: Path) -> str:
    parts = path.relative_to(ENGINE.parent.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ENGINE.rglob("*.py"))}


def statements(tree: ast.AST, *, ever: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when the module is loaded, or with `ever` when its functions are called.

    Imports for type checkers only are left out.
    """
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                yield node
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not ever:
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case _:
                yield from statements(node, ever=ever)


def imports(name: str, *, ever: bool = False) -> set[str]:
    """The engine's modules that a module imports when it is loaded or, with `ever`, at any time."""
    found: set[str] = set()
    for node in statements(ast.parse(MODULES[name].read_text()), ever=ever):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            module = node.module or ""
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys() - {name}


def test_file_names_are_unique() -> None:
    names = [path.name for path in MODULES.values() if path.name != "__init__.py"]
    assert [name for name in set(names) if names.count(name) > 1] == []


# Modules that text needs as well: plain data, and one kind of cache.
PLAIN = {
    f"{ROOM}.{name}"
    for name in ("media.limits", "speech.transcript", "vision.families", "vision.media_plan")
}
ROOMS = tuple(f"{ROOM}.{name}" for name in ("media", "speech", "vision"))


def test_modules_for_text_import_nothing_for_media() -> None:
    media = {name for name in MODULES if name.startswith(ROOMS)}
    assert media > PLAIN
    text = (MODULES.keys() - media) | PLAIN
    leaks = {name: leak for name in text if (leak := imports(name) & media - PLAIN)}
    assert leaks == {}


def test_programs_that_decode_media_load_no_settings() -> None:
    """They start for each file, and importing the settings took a third of their own imports."""
    found, new = set[str](), {f"{ROOM}.media.{kind}_process" for kind in ("audio", "video")}
    while new:
        found |= new
        new = {each for name in new for each in imports(name)} - found
    assert f"{ROOM}.media.limits" in found
    assert not found & {f"{ROOM}.settings", f"{ROOM}.request"}


def test_only_the_loader_imports_builders_and_only_when_needed() -> None:
    builders = {name for name in MODULES if name.endswith("_builder")}
    assert len(builders) == 4
    loader = f"{ROOM}.loading.loader"
    assert imports(loader, ever=True) & builders == builders
    assert imports(loader) & builders == set()


def test_modules_for_ranks_are_loaded_only_if_there_are_ranks() -> None:
    """Except the one that says whether there are any. Others need pydantic, which loads slowly."""
    ranks = {name for name in MODULES if name.startswith(f"{ROOM}.ranks.")}
    ranks.remove(f"{ROOM}.ranks.rank_info")
    alone = MODULES.keys() - ranks
    assert {name: leak for name in alone if (leak := imports(name) & ranks)} == {}


def test_planning_does_not_need_mlx() -> None:
    modules = [name for name in MODULES if name.startswith(f"{ROOM}.planning.")]
    assert len(modules) > 10
    asked = (
        f"import sys, {', '.join(modules)}; print(*[one for one in sys.modules if 'mlx' in one])"
    )
    ran = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


WITHOUT_DRIVER = """
import sys
class NoDriver:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "mlx.core":
            raise ImportError("libcuda.so.1: cannot open shared object file")
sys.meta_path.insert(0, NoDriver)
from backend.engine.errors import EngineFailed
from backend.engine.mlx_lm_import import import_mlx_lm
for _ in range(2):
    try:
        import_mlx_lm()
    except EngineFailed as refused:
        print(refused)
"""


def test_a_missing_driver_is_named_at_every_load() -> None:
    command = [sys.executable, "-c", WITHOUT_DRIVER]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    sentences = ran.stdout.splitlines()
    assert len(sentences) == 2
    assert all("no NVIDIA driver (libcuda.so.1): start the" in one for one in sentences)


READ_FILES = """
import collections, gc, importlib.util, sys
opened = collections.Counter()
sys.addaudithook(lambda event, values: opened.update([str(values[0])]) if event == "open" else None)
from pathlib import Path
importlib.util.cache_from_source = lambda path: f"{sys.argv[1]}/kept/{Path(path).name}c"
from backend.engine.mlx_lm_import import import_mlx_lm
import_mlx_lm()
print(gc.isenabled(), len(gc.get_objects()) < gc.get_freeze_count() / 10)
read = sum(times for path, times in opened.items() if path.endswith("/configuration_zoedepth.py"))
print(read)
from transformers.models import AutoTokenizer, ZoeDepthConfig
import transformers
from transformers.utils.import_utils import define_import_structure, fetch__all__
models = Path(transformers.__file__).parent / "models"
for prefix in (None, "models"):
    theirs = define_import_structure.__wrapped__(models, prefix)
    assert define_import_structure(models / "__init__.py", prefix) == theirs
for file in models.parent.rglob("*.py") if read else ():
    text = file.read_text()
    assert fetch__all__(text) == fetch__all__.__wrapped__(text), file
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The output of two processes that import mlx-lm, about garbage collection and about files."""
    command = [sys.executable, "-c", READ_FILES, str(tmp_path_factory.mktemp("imported"))]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return [
        subprocess.run(
            command, env=environ, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for _ in range(2)
    ]


def test_garbage_collections_leave_out_what_was_imported(imported: list[list[str]]) -> None:
    assert [lines[0] for lines in imported] == ["True True"] * 2


def test_the_models_of_transformers_are_listed_once_and_as_transformers_does(
    imported: list[list[str]],
) -> None:
    assert [lines[1] for lines in imported] == ["1", "0"]


def test_names_are_listed_again_if_they_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(mlx_lm_import, "cache_from_source", lambda _: str(tmp_path / "kept.pyc"))
    names = {frozenset({"torch"}): {"one.two": {"Three"}}}
    asked: list[Path] = []

    def read(path: Path) -> dict[frozenset[str], dict[str, set[str]]]:
        asked.append(path)
        return names

    def listed() -> object:
        return mlx_lm_import._once(read, tmp_path)(tmp_path)

    (tmp_path / "kept.json").mkdir()
    assert listed() == names
    assert listed() == names
    assert len(asked) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    (tmp_path / "kept.json").rmdir()
    (tmp_path / "kept.json").write_text("[")
    assert [listed(), listed()] == [names, names]
    assert len(asked) == 3
