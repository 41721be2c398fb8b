"""What mlx-lm and mlx-vlm say of their models, read from their files without importing them.

Importing either costs a second, and touches MLX, which belongs to the engine thread.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path


def model_files(package: str, pattern: str) -> Iterable[Path]:
    """The files of its `models` that match; none where it is not installed."""
    folder = _folder(package)
    return (folder / "models").glob(pattern) if folder else ()


@cache
def aliases(package: str) -> Mapping[str, str]:
    """Model types that the package builds with another type's module."""
    folder = _folder(package)
    if folder is None:
        return {}
    # MODEL_REMAPPING is a literal in mlx-lm 0.32 and mlx-vlm 0.7.
    for node in ast.parse((folder / "utils.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "MODEL_REMAPPING":
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    return {}


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None
