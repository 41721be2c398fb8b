"""Changes the behaviour of single objects of mlx-lm, mlx-vlm and transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class WithOffset:
    """A layer's cache that states another offset, for code that computes with the offset."""

    def __init__(self, cache: Any, offset: Any) -> None:
        self._cache = cache
        self.offset = offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


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
