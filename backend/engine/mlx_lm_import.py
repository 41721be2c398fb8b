"""Imports mlx-lm without its side effect on the process, and without reading transformers twice.

mlx-lm 0.32.2 sets the limit of open files when it is imported: it lowers a larger limit, and if the
hard limit is smaller, it raises an exception, which would make every load fail.

transformers 5.23.0 lists the names in its 1,600 model files by reading them all, once for
`transformers` and again for `transformers.models`, and splits all of each file into lines to find
its `__all__`, which is at the end. Other versions are imported as they are.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_READ_TWICE = "5.23.0"  # the version of transformers


def import_mlx_lm() -> None:
    """Import mlx-lm without changing the limits of the process.

    The imported objects are excluded from garbage collection, which each load and each Free runs:
    they are most of the process's objects, and never become garbage.
    """
    if "mlx_lm.utils" in sys.modules:
        return
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    gc.disable()
    try:
        if metadata.version("transformers") == _READ_TWICE:
            _import_transformers()
        import mlx_lm.utils  # noqa: F401
    finally:
        resource.setrlimit = setrlimit
        gc.freeze()
        gc.enable()


def _import_transformers() -> None:
    """Import `transformers.models` with the names that were read for `transformers`."""
    sys.meta_path.insert(0, _QuickNames)
    try:
        import transformers
    finally:
        sys.meta_path.remove(_QuickNames)
    from transformers.utils import import_utils

    if "transformers.models" in sys.modules:
        return
    models = Path(transformers.__file__).parent / "models"
    # Importing transformers has read this folder; the function returns its cached result.
    names = import_utils.spread_import_structure(
        import_utils.create_import_structure_from_path(models)
    )
    read = import_utils.define_import_structure
    import_utils.define_import_structure = lambda _: names
    try:
        import transformers.models
    finally:
        import_utils.define_import_structure = read


class _QuickNames:
    """Finds the module of transformers that lists names, and makes it search files from the end."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, _: object = None) -> ModuleSpec | None:
        if name != "transformers.utils.import_utils":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.fetch__all__ = _from_the_end(module.fetch__all__)  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _from_the_end(names_of: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """The same function, which is given only the lines from the last `__all__` on."""

    @wraps(names_of)
    def names(content: str) -> list[str]:
        return names_of(content[content.rfind("\n__all__") + 1 :])

    return names
