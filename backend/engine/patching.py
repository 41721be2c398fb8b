"""Replaces methods of single objects of mlx-lm, mlx-vlm and transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch(part: Any, call: Callable[..., Any], method: str = "__call__") -> None:
    """Replace a method of one object, not of other objects of its class.

    Python looks special methods up in the class, so the object gets a new class.
    call: called with the class's method, the object, and the arguments.
    """
    kind = type(part)
    own = getattr(kind, method)

    def patched(*arguments: Any, **named: Any) -> Any:
        return call(own, *arguments, **named)

    part.__class__ = type(kind.__name__, (kind,), {method: patched})
