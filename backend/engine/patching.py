"""Replaces methods of single objects of mlx-lm, mlx-vlm and transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch(part: Any, call: Callable[..., Any], method: str = "__call__") -> None:
    """Replace a method of one object; other objects of its class keep theirs.

    call: receives the method of the class, the object, and the arguments. Python looks special
    methods up in the class, so the object gets a class of its own.
    """
    kind = type(part)
    own = getattr(kind, method)

    def patched(*arguments: Any, **named: Any) -> Any:
        return call(own, *arguments, **named)

    part.__class__ = type(kind.__name__, (kind,), {method: patched})
