"""Imports mlx-lm without its side effect on the process, and without reading transformers twice.

mlx-lm sets the limit of open files when it is imported: it lowers a larger limit, and if the hard
limit is smaller than its own, the import raises an exception, which would make every load fail.

transformers lists the names in its 1,600 model files by reading all of them (35 MB), once for
`transformers` and again for `transformers.models`. To find the `__all__` at the end of a file, it
splits the whole file into lines. Here the list is made once, and stored beside Python's bytecode of
transformers. A version of transformers other than `_LISTED` is imported without this.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, wraps
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from backend.engine.device import without_driver

_LISTED = "5.24.0"  # the version of transformers that this module knows

# The names in each module, by the packages that these modules need.
_Names = dict[frozenset[str], dict[str, set[str]]]


def import_mlx_lm() -> None:
    """Import mlx-lm without changing the limits of the process.

    The imported objects, which are most of the process's, are excluded from the garbage collection
    that runs at each load and each Free. Raises EngineFailed if the device has no driver.
    """
    if "mlx_lm.utils" in sys.modules:
        return
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    gc.disable()
    try:
        if metadata.version("transformers") == _LISTED:
            _import_transformers()
        import mlx_lm.utils  # noqa: F401
    except ImportError as fault:
        raise without_driver(fault) or fault from None
    finally:
        resource.setrlimit = setrlimit
        gc.freeze()
        gc.enable()


def _import_transformers() -> None:
    """Import `transformers` and `transformers.models`, which need the same names."""
    sys.meta_path.insert(0, _QuickNames)
    try:
        import transformers.models  # noqa: F401
    finally:
        sys.meta_path.remove(_QuickNames)


class _QuickNames:
    """An importer that makes transformers list the names in its files once, and quickly."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, _: object = None) -> ModuleSpec | None:
        if name != "transformers.utils.import_utils":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.fetch__all__ = _from_the_end(module.fetch__all__)
            models = Path(module.__file__).parents[1] / "models"
            module.define_import_structure = _once(module.define_import_structure, models)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _from_the_end(names_of: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Return a function that calls `names_of` with the lines from the last `__all__` on only."""

    @wraps(names_of)
    def names(content: str) -> list[str]:
        return names_of(content[content.rfind("\n__all__") + 1 :])

    return names


def _once(names_in: Callable[..., _Names], models: Path) -> Callable[..., _Names]:
    """Return a function like `names_in`, which stores its list for the folder `models`."""
    stored = Path(cache_from_source(str(models / f"names-{_LISTED}.py"))).with_suffix(".json")

    @cache
    def names() -> _Names:
        with suppress(OSError, ValueError):
            return {
                frozenset(needed): {module: set(each) for module, each in modules.items()}
                for needed, modules in json.loads(stored.read_bytes())
            }
        found = names_in(models)
        _store(stored, found)
        return found

    @wraps(names_in)
    def structure(path: str | Path, prefix: str | None = None) -> _Names:
        if Path(path) not in (models, models / "__init__.py"):
            return names_in(path, prefix)
        before = f"{prefix}." if prefix else ""
        return {  # the caller may change it
            needed: {before + module: each for module, each in modules.items()}
            for needed, modules in names().items()
        }

    return structure


def _store(path: Path, names: _Names) -> None:
    """Write the list for later processes, where Python may write bytecode."""
    if sys.dont_write_bytecode:
        return
    plain = [
        (sorted(needed), {module: sorted(each) for module, each in modules.items()})
        for needed, modules in names.items()
    ]
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(plain))
        fresh.replace(path)
    except OSError:  # the folder cannot be written to, or the disk is full
        with suppress(OSError):
            fresh.unlink()
